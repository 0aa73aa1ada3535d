"""Saving: complete, verified checkpoints of a call, usually without waiting for a disk.

Start with `saver.py`, which decides with all ranks where each checkpoint goes: `snapshots.py` writes it
into memory, `_direct.py` to disk. `contents.py` is the interface to what is saved, and
`trainer_contents.py` that of a Trainer. `_spare_files.py` lets the save functions of torch and safetensors
write over the files of an earlier snapshot, `_cadence.py` says when a snapshot is due, and `copies.py` copies
those of several hosts. Imports
`runtime/rank/exact/`, the modules of `runtime/rank/`, `runtime/snapshots/`, `runtime/checkpoints/`,
`runtime/upstream/` and `watchdog/`. Does not write snapshots to disk; the drain worker does.
"""
