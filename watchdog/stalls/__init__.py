"""Stalls that collectives cannot prove: phases beyond their learned deadline, exit hangs, stragglers.

Start with `detection.py` (`find_stall`). `durations.py` holds what was measured, `deadlines.py` derives
deadlines from it, `overdue.py` applies them to a rank's open phases, and `nested_phases.py` subtracts the
time of inner phases. Pure: time is passed in, nothing is measured or terminated here. Imports
`grpo_run.watchdog.causes`, `observation` and `rank_names` only.
"""
