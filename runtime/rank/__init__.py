"""What runs inside one rank of one attempt: its session, vote, collective log, heartbeat and hooks.

Start with `bootstrap.py`, which runs the user's script, and `session.py`, the rank's identity and
connections. `vote.py` is the group in which ranks decide together, `collective_recorder.py` logs
collectives, and `heartbeat.py` shows that the interpreter runs. `points.py` has where features take part.
`preload.py` runs in the forkserver.

The rooms, lower ones first: `exact/` and `memory/`; `saving/`; `resuming/`; `step/`; `rollouts/`; `hooks/`
for Trainers and `loops/` for hand-written loops. A room imports rooms before it, the modules of this one, the
shared rooms of `runtime/` and `watchdog/`; never `runtime/supervisor/`. Does not decide what follows a fault.
"""
