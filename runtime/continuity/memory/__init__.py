"""Facts of a run's memory, as ranks and supervisor share them: their files, which changes leave the update as it is, and
the closed form of its peaks.

The facts themselves are in `runtime.continuity.memory_facts`. Imports `continuity`'s plain data and `files`. Start reading at
`split_exactness.py`.
"""
