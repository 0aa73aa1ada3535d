"""Forecast: predict whether the next steps fit into memory with the rollout just generated; if not, use smaller passes.

Start with `attach.py`, which wraps methods of GRPO's and RLOO's trainers. `fit.py` predicts from what was measured, `decision.py`
says how often micro-batches are split, `rollouts.py` keeps one rank's side of it and lets all ranks decide, and `splitting.py`
splits a micro-batch within `training_step`. May import `calls`, `rank`, `memory_plan`, `saving.description`, `patches`,
`upstream`, `runtime` and `watchdog`.
"""
