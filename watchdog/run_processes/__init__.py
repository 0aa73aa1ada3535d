"""Processes of a run beyond its ranks: which exist, who started them, and what they are connected to.

Start with `remaining.py`, what remains after the last line of every script. `ownership.py` proves which
processes of the machine belong to the run, `keeping.py` which of them the user keeps, and
`connections.py` which have connections to processes outside the job. Imports the modules of
`watchdog/` and `watchdog/stalls/`. Reads /proc; judges nothing and ends nothing.
"""
