"""Exact state: what a bit-exact resume needs in addition to a Hugging Face checkpoint.

Start with `state.py`. Each module saves and restores one kind of state: `data_order.py`,
`callback_state.py`, `gradient_order.py` for DDP, and `_trainer_state.py` for log values, reference model,
reward functions and the rollout in use. `format.py` and `encoding.py` define the files, and `geometry.py`
handles another world size or micro-batch size. Imports `runtime/upstream/` and `runtime/errors.py`. Used by
`runtime/rank/saving/`, `runtime/rank/resuming/`, `runtime/rank/hooks/` and `runtime/rank/loops/`. Does not
choose a checkpoint.
"""
