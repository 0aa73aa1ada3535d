"""Saving: complete, verified checkpoints of a call, usually without waiting for a disk.

`saver.py` decides, with all ranks, where each checkpoint goes: `snapshots.py` copies it into memory, `direct.py` writes it
to disk. `flags.py` is what the ranks agree on first. `contents.py` is what is saved; `trainer_contents.py` that of a
Trainer, whose checkpoint method it wraps. Imports `capture`, `exact`, `rank`, `runtime.staging` and
`runtime.checkpoints`; imported by `calls`, `hooks` and `loops`.
Start reading at `saver.py`.
"""
