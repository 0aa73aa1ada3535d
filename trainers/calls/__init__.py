"""Calls: what a guarded `train()` call and a hand-written loop have in common.

How a call is numbered (`guard.py`) and what it resumes from (`resume.py`), the votes on its steps (`step_vote.py`,
`requests.py`), what follows a step (`steps.py`, `logged.py`), and its end. Knows neither a Trainer nor a loop:
`hooks` and `loops` tell it what they are. Imports `saving`, `resuming` and `rank`; imported by `hooks` and `loops`.
Start reading at `steps.py`.
"""
