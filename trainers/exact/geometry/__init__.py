"""Geometry: whether the exact state of a checkpoint can go on with another number of ranks, or with other micro-batches.

`resharding.py` decides for another number of ranks, `regrouping.py` for micro-batches of another size. Imports `exact.format` and
`upstream`; imported by `exact`'s own files and by `resuming`. Start reading at `regrouping.py`.
"""
