"""Processes of one node: how ranks start, how they are terminated, and where their output goes.

Start with `agent.py`, torch elastic's agent with our start method. `ranks.py` holds the processes of one
attempt, `forkserver.py` the interpreter with preloaded modules that they are forked from, and `usage.py`
reads their process trees. `helpers.py`, `adoption.py` and `termination.py` handle what the ranks have
started. Imports `runtime/upstream/`, the modules of `runtime/` and `watchdog/`. Decisions come from an
`AttemptController`, the supervisor.
"""
