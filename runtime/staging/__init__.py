"""Snapshots in memory and their way to disk: staging slots, snapshot buffers, and the drain worker.

Ranks write snapshots into slots on a memory-backed file system (`slot.py`, `buffer.py`, `index.py`); the
supervisor (`drain_scheduler.py`) tells a separate process (`drain_worker.py`) which one to write to disk as a
checkpoint. `ownership/` says which run an area belongs to. May import `runtime.checkpoints`, `runtime.processes` and below. Start with `area.py`, which shows
the directory layout.
"""
