"""Attempts: what one attempt of a run is on this node, how it is prepared, and which of its ranks have exited.

Start with `attempt.py`. `preparation.py` is what happens before its ranks start; `exits.py` holds the exits, and which
of them are failures. Used by the supervisor and the incident investigation. Starts and terminates no process, and takes
no decision.
"""
