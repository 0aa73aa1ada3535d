"""Resuming: which checkpoint a call starts from, on disk or in memory.

Start with `choice.py`: rank 0 chooses, and all ranks agree. `identification.py` recognizes the call among
those of earlier attempts, `_fit.py` decides whether a checkpoint fits the run, and `request.py` has the data
types. `memory.py` opens a snapshot in memory, which the trainer loads like a checkpoint on disk; `hosts.py`
chooses that of several hosts and brings it to each. Imports
`runtime/rank/exact/` and the shared rooms; used by `runtime/rank/step/`,
`runtime/rank/hooks/` and `runtime/rank/loops/`. Restores no state of a trainer (`runtime/rank/exact/`).
"""
