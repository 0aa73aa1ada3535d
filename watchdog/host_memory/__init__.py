"""Host memory while ranks run: which processes use it, which limit is nearest, and which ones the kernel's OOM killer killed.

Imports `watchdog.cgroups`, `processes` and `duration_text` only. `sample.py` is what is known at one moment, `reading.py` reads it from /proc and
the cgroups, `kills.py` follows the kernel's counters of killed processes. Start with `sample.py`.
"""
