"""Explaining: which single wrong assumption about a job would need the memory that was observed.

Imports `planning`; imported by `cli.planning`. Start at `assumptions.py`; `own_code.py` traces what is not TRL's code.
"""
