"""Plans: traces of a run with other memory plans, for the supervisor, after an out-of-memory error.

Imports `trainers.planning` and `runtime.continuity`. Start reading at `worker.py`, the process; `job_of_run.py` says which job a
run is, and which runs cannot be traced.
"""
