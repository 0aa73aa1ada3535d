"""Hooks on the user's Trainers: guarded `train()` calls and phases.

May import every other package of `trainers` except `loops` and `recipes`. Start reading at `attach.py`, which wraps
`Trainer.train`; `train_call.py` runs one call; `callback.py` acts at each step.
"""
