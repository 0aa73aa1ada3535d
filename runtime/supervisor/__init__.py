"""The supervisor of a run on one node: faults, decisions, attempts, and the end of the run.

Start with `supervisor.py`, which the agent calls about five times a second. `faults.py` shows the way of a
fault: `incident.py` gathers evidence, `watchdog/diagnosis/fault.py` judges it, `policy.py` decides.
`attempt.py` is about one attempt, `stop.py` and `outcome.py` about the end. `host_watch.py` guards host
memory, `guardian.py` cleans up after a killed supervisor, and `last_resort.py` reports the supervisor's own
failures. Hangs are detected in `detection/`.

May import the shared rooms of `runtime/` and `watchdog/`, never `runtime/rank/`. Does not start ranks
(`runtime/processes/`) and does not print; the command line passes the terminal in.
"""
