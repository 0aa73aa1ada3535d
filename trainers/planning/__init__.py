"""Planning: how much memory a training job needs, predicted before it runs by tracing TRL's own code without data.

Imports `upstream`, `runtime.continuity` and `runtime.errors`; imported by `cli.planning`. Start reading at `prediction.py`: `job.py`
says what is planned, `traces` records a `timeline.py`, `terms.py` adds what a trace does not show, and `sizes.py` gives the closed
form that checks the result. `changes.py` and `explaining` ask the same predictor about other jobs.
"""
