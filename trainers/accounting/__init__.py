"""Accounting in a rank: how much memory each phase uses, measured when the phase ends.

Start with `phases.py`, which decides when to measure and writes to the board. `device.py` reads torch's allocator, and
`peaks.py` lets it start a new peak in each phase without the script seeing that; `resident.py` reads the host's figures.
Imports `grpo_run.watchdog` and `grpo_run.runtime.board` only; torch is used once the script has imported it.
"""
