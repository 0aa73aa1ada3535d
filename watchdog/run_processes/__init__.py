"""Processes of a run beyond its ranks: which exist, which the ranks have started, and what they are connected to.

Start with `remaining.py`, what remains after the last line of every script; `process_tree.py` reads all processes
of the machine and `peers.py` the other ends of connections. Imports `watchdog.processes`, `watchdog.socket_tables`
and `watchdog.stalls`. Reads /proc; judges nothing and ends nothing.
"""
