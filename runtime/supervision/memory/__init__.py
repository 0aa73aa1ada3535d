"""Out of memory: change the memory plan, so that the next attempt needs less memory for the same update.

Imports `runtime.continuity`, `runtime.record` and `watchdog`; imported by `faults.py`, the supervisor and `cli.launching`. Start
reading at `ladder.py`: `prediction.py` and `refusals.py` say what it may use, `policy.py` when it is used, `run_memory.py` acts.
"""
