"""What a guarded `train()` call and a hand-written loop have in common: votes, steps and resuming.

Start with `events.py`: what happens at each event of a step, in order. `step_vote.py` is the vote on it,
`logged.py` publishes what a step logs, `resume.py` agrees on what a call resumes from, and `guard.py` holds
what the calls of one attempt share. Knows neither a Trainer nor a loop: `runtime/rank/hooks/` and
`runtime/rank/loops/` call it. Imports `runtime/rank/memory/`, `runtime/rank/resuming/`,
`runtime/rank/saving/`, the modules of `runtime/rank/` and the shared rooms.
"""
