"""Saving: complete, verified checkpoints of a `train()` call, usually without waiting for a disk.

`saver.py` wraps the trainer's checkpoint method and decides, with all ranks, where each checkpoint goes:
`snapshots.py` copies it into memory, `direct.py` writes it to disk. `flags.py` is what the ranks agree on
first. Imports `capture`, `exact`, `rank`, `runtime.staging` and `runtime.checkpoints`; imported by `hooks`.
Start reading at `saver.py`.
"""
