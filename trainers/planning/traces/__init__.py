"""Traces: TRL's own trainer on tensors that have sizes and no data, and every allocation that it makes.

Imports `planning.job`, `planning.timeline` and `upstream`; imported by `planning`. Start at `trace.py`: `trainer.py` builds what it
runs, `tracker.py` records.
"""
