"""Loops: the implementation of `trainers/loop.py`, which supervises hand-written training loops.

Start with `run.py`, one loop of one attempt: it resumes, commits steps and ends. `steps.py` is what the
script iterates over, also outside `grpo-run launch`. `_state.py` saves the script's objects, `_rank_state.py`
and `data_position.py` what each rank keeps for itself, and `_optimizers.py` observes the optimizers' steps.
May import `runtime/rank/step/` and the rooms below it. Knows no Trainer.
"""
