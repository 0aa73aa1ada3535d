"""Out of memory: what is changed before the next attempt, so that it needs less memory and ends in the same update.

Imports `runtime.continuity`, `runtime.record` and `watchdog`; imported by `faults.py`, the supervisor and `cli.launching`. Start
reading at `ladder.py`: `prediction.py` and `refusals.py` say what it may use, `policy.py` when it is used, `run_memory.py` acts.
"""
