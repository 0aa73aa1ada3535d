"""Processes of a run beyond its ranks: which exist, who started them, and what they are connected to.

Start with `remaining.py`, what remains after the last line of every script. `process_tree.py` reads all
processes of the machine, `ownership.py` proves which belong to the run, `keeping.py` which the user keeps,
and `connections.py` tells which have connections to processes outside the job. Imports the modules of `watchdog/` and
`watchdog/stalls/`. Reads /proc; judges nothing and ends nothing.
"""
