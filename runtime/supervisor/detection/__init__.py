"""Detection of hangs in running ranks, from slots, /proc and Flight Recorders.

Start with `detector.py`: `HangDetector.scan` is called about ten times per second and combines
`_deadlock_detector.py` (proof from collectives), `_wait_detector.py` (proof that nothing can wake a rank),
`_stall_detector.py` (deadlines) and `exit_hangs.py` (processes that do not exit). The other modules read
what these need. The decisions themselves are pure functions in `watchdog/`.

Imports `runtime/board/`, `runtime/processes/`, `runtime/upstream/` and `watchdog/`; used by
`runtime/supervisor/`. What cannot be read is unknown. Terminates no process and writes no file.
"""
