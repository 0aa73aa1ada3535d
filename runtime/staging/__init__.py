"""Snapshots in memory and their way to disk: staging slots, snapshot buffers, and the drain worker.

Ranks write snapshots into slots on a memory-backed file system (`slot.py`, `buffer.py`, `index.py`); `draining/` writes
them to disk as checkpoints. `ownership/` says which run an area belongs to. May import `runtime.checkpoints`, `runtime.processes` and below. Start with `area.py`, which shows
the directory layout.
"""
