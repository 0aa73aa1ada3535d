"""One supervised run, from its first process to its exit code: start, connect, print and shut down its components.

Start at `supervise.py`, which connects the parts in order. `own_processes.py` marks what belongs to the run,
`elastic.py` builds the agent, `rank_environment.py` is what a rank is told, `stop_signals.py` is what signals do.
Imports every other package; called by `launch.py` only.
"""
