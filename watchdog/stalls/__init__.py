"""Stalls that collectives cannot prove: phases beyond their deadline, exit hangs, stragglers.

Start with `stall.py` (`find_stall`). `durations.py` holds what was measured, `deadlines.py` derives deadlines
from it, and `overdue.py` applies them to a rank's open phases. `step_clock.py` and `awaited.py` say where a
step's time goes and who is waited for. Pure: time is passed in, and nothing is measured or terminated.
Imports the modules of `watchdog/` only.
"""
