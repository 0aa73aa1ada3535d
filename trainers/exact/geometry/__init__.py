"""Geometry: resume the exact state of a checkpoint at another world size or micro-batch size.

`resharding.py` decides for another number of ranks, `regrouping.py` for micro-batches of another size. Imports `exact.format` and
`upstream`; imported by `exact`'s own files and by `resuming`. Start reading at `regrouping.py`.
"""
