"""Attempts: one attempt of a run on this node, its preparation, and the exits of its ranks.

Start with `attempt.py`. `preparation.py` is what happens before its ranks start; `exits.py` holds the exits, and which
of them are failures. Used by the supervisor and the incident investigation. Starts and terminates no process, and takes
no decision.
"""
