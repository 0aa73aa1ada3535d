"""Detection of ranks that nothing alive can wake, from the wait states of threads in /proc.

Start with `wait_detector.py`, which decides when to look and reports. `processes.py` reads the threads of a
rank and its descendants, `channels.py` finds who holds the other ends of pipes and sockets, and
`time_limits.py` the time limits of sockets. The proof is `grpo_run.watchdog.waits`. Imports
`grpo_run.runtime.board`, its parent folder and `grpo_run.watchdog`. Terminates no process and writes no file.
"""
