"""Exact state: what a bit-exact resume needs in addition to a Hugging Face checkpoint.

Each file here saves and restores one kind of state: the rollout in use, the data order, pending log values,
the gradient order of DDP, a synced reference model, stateful reward functions. `format.py` and `encoding.py`
define the files on disk, `geometry` decides whether another world size or other micro-batches can resume. Imports
`trainers.upstream` and `runtime.errors`; imported by `resuming`, `saving` and `hooks`. Start reading at
`state.py`.
"""
