"""Processes of one node: how ranks are started, waited for and terminated, and how their output reaches the terminal.

Start with `agent.py`, torch elastic's agent with our start method; `ranks.py` holds the processes of one attempt and
`forkserver.py` the warm interpreter that they are forked from. May import `errors.py`, `upstream.py` and `watchdog`;
decisions come from an `AttemptController` (`supervision/`).
"""
