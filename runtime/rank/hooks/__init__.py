"""Hooks on the user's Trainers: guarded `train()` calls, and phases on the board.

Start with `attach.py`, which wraps `Trainer.train`. `train_call.py` runs one call, `_callback.py` acts at
each step, `_phases.py`, `_reward_functions.py` and `_tools.py` mark what a rank is doing, `_rollout_hooks.py`
orders the hooks of generation and rewards, and `_resume.py` describes a call for the choice of its
checkpoint. `_no_trainer.py` observes scripts without a Trainer. May import every other room of
`runtime/rank/` except `runtime/rank/loops/`. Methods are wrapped, never copied.
"""
