"""Memory of the host while ranks run: who uses it, which limit is nearest, and whom the kernel has killed for lack of it.

Imports `watchdog.cgroups`, `processes` and `duration_text` only. `sample.py` is what is known at one moment, `reading.py` reads it from /proc and
the cgroups, `kills.py` follows the kernel's counters of killed processes. Start with `sample.py`.
"""
