"""What `grpo-run launch` prints: a progress line, events, faults, and the output of ranks that are shown.

Start at `terminal.py`, which writes to the console. `progress.py` and `incidents.py` turn the state of a run
into text; `pipe_schedule.py` and `tracebacks.py` decide when it is printed. They print nothing themselves.
Imports runtime and watchdog; called by `cli.launching` only.
"""
