"""What `grpo-run launch` prints: a progress line, events, faults, and the output of ranks that are shown.

Start with `terminal.py`, which writes to the console and decides when the progress line is printed.
`_progress.py` and `_incidents.py` turn the state of a run into text, and `background_output.py` writes in a
thread, so that a reader that stops does not stop the supervisor.
Imports `runtime/` and `watchdog/`; used by `cli/launching/` only.
"""
