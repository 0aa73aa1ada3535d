"""Processes of one node: how ranks start, how they are terminated, and where their output goes.

Start with `agent.py`, torch elastic's agent with our start method; `ranks.py` holds the processes of one
attempt and `forkserver.py` the warm interpreter that they are forked from. May import `errors.py`,
`upstream.py` and `watchdog`; decisions come from an `AttemptController` (`supervision/`).
"""
