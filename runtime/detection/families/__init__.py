"""Families of processes: everything that a rank has started, what it uses, and what it is connected to.

Start with `usage.py` (`find_families`); `connections.py` tells connections inside the job from others. Reads
/proc and the kernel's socket tables; imports `grpo_run.watchdog.processes` only. What cannot be read is unknown.
Judges nothing.
"""
