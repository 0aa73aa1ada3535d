"""Detection of hangs in running ranks, from slots, /proc and Flight Recorders.

Start with `detector.py`: `HangDetector.scan` is called about ten times per second and combines three
detectors: `deadlock_detector.py` (proof from collectives), `stall_detector.py` (deadlines) and
`exit_hangs.py` (processes that do not exit). The decisions themselves are pure functions in
`grpo_run.watchdog`. Imports `grpo_run.runtime.board` and `grpo_run.watchdog`. Terminates no process and
writes no file.
"""
