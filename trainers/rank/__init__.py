"""One rank of one attempt: its session, vote group, collective log, heartbeat, output and injected faults.

May import `trainers.upstream` and `trainers.patches`, and from outside `runtime` and `watchdog`; knows
nothing of Trainers beyond the names in `upstream`. Start reading at `session.py`.
"""
