"""Draining: how snapshots in memory become checkpoints on disk while training continues.

The supervisor (`drain_scheduler.py`) tells a separate process (`drain_worker.py`) which snapshot to write;
`drain_policy.py` chooses it, and `drain.py` writes it; `drain_requests.py` waits for the process, and `drain_reports.py` says what
became of it. Imports `runtime.checkpoints`, `runtime.processes` and the slots
of `runtime.staging`. Start with `drain_scheduler.py`.
"""
