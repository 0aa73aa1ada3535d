"""Supervision of one run: lifecycle, faults, decisions and the end of the run.

Start with `supervisor.py`, which the agent calls about five times a second; `faults.py` shows the order from a
fault to a decision, `policy.py` decides, and `lifecycle.py` is the table of states. `attempts/` is what an attempt is
and how it is prepared; `ending/` is how a run ends. The top layer of
`runtime`: may import every other package of it, and `watchdog`. Does not import trainers or dashboards; the
command line passes those in.
"""
