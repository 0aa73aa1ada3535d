"""Snapshots in memory and their way to disk: staging areas, slots, and the drain worker.

Start with `area.py`, which shows the layout of the directory. Ranks write snapshots into slots on a
memory-backed file system (`slot.py`). The supervisor's `drain_scheduler.py` tells
a separate process (`_drain_worker.py`) which one to write to disk as a checkpoint; `_drain_policy.py` chooses
it. `ownership.py` says which run an area belongs to, and `parts.py` what a host has of a snapshot of several.
Imports `runtime/checkpoints/`, `runtime/processes/`, `runtime/upstream/` and `watchdog/`. Does not decide
when ranks take a snapshot.
"""
