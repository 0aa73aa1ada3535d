"""Resuming: which checkpoint a `train()` call starts from, chosen by rank 0 and used by all ranks.

`identification.py` recognizes the call among those of earlier attempts (`settings_digest.py`, `moved_directory.py`).
`choice.py` chooses, `fit.py` decides whether a checkpoint fits the run, `script_argument.py` handles the
script's own `resume_from_checkpoint`, `agreement.py` sends the choice to the other ranks. Imports `exact`,
`rank`, `runtime.checkpoints` and `runtime.continuity`; imported by `calls`. Start reading at `choice.py`.
"""
