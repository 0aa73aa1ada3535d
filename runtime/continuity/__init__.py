"""Continuity: how a run finds its position after a restart.

`train_calls.py` is the ledger of the run's `train()` calls, `expected.py` says what a restart resumes from,
`held.py` keeps checkpoints while a script clears its output directory. Imports `runtime.checkpoints` only;
imported by `record`, `launch`, `supervision` and the ranks. Start reading at `train_calls.py`.
"""
