"""Resuming: which checkpoint a call starts from, and loading it from memory.

Start with `choice.py`: rank 0 chooses, and all ranks agree. `identification.py` recognizes the call among
those of earlier attempts, `fit.py` decides whether a checkpoint fits the run, and `request.py` has the data
types. For a snapshot in memory, `snapshot_folder.py` opens it and `loading.py` serves its files to the
trainer. Imports `runtime/rank/exact/`, `runtime/rank/memory_plan/`, `runtime/rank/saving/` and the shared
rooms; used by `runtime/rank/step/`, `runtime/rank/hooks/` and `runtime/rank/loops/`. Restores no state of a
trainer (`runtime/rank/exact/`).
"""
