"""One supervised run, from its first process to its exit code: connect, start, print and shut down.

Start with `supervise.py`, which connects the parts in order. `rank_environment.py` is what a rank is told
and what marks the run's processes, `elastic.py` builds the agent, `stop_signals.py` is what signals do, and
`on_end.py` runs after the end. Imports every other package; called by `cli/launch.py` only. Decides nothing
about the run.
"""
