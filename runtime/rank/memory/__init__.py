"""Memory of a rank: measured by phase, and freed when that is worth the time.

Start with `phases.py`, which decides when to measure and writes to the board; `device.py` reads torch's
allocator. `cleanup.py` frees memory at the same step on every rank, `cleanup_policy.py` decides what a rank
needs, and `garbage_collection.py` keeps automatic collection out of the phases of a step. Imports
`runtime/board/` and `watchdog/` only; torch is used once the script has imported it.
"""
