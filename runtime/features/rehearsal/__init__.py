"""Rehearsal: shorten the calls of `grpo-run rehearse`, write elsewhere, and note what runs are compared by.

`rank.py` acts only where `runtime/launch/rehearsal.py` finds the variable of a rehearsal; `_traces.py` writes
the notes. `runtime/rehearsal/` starts the runs and judges.
"""
