"""Loading: serve the files that a trainer loads when it resumes from a snapshot in memory.

`snapshot.py` opens the snapshot that the supervisor has named, `folder.py` makes the directory that stands for its
checkpoint, `interception.py` replaces the load functions of torch and safetensors while the trainer loads, and
`tensors.py` copies tensors out of the buffers; `renamed_weights.py` adds weights that the checkpoint has under other names. The counterpart of `capture`. Imports `capture`, `runtime.staging`
and `trainers.upstream`; imported by `resuming` and `hooks`. Start reading at `snapshot.py`.
"""
