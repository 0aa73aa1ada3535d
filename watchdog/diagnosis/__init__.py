"""Diagnosis: turn exits, proved deadlocks, stalls and exhausted memory into verdicts.

Start with `exits.py`, which decides which of several failed ranks failed first, and recognizes those that
only lost a connection. `hangs.py` gives deadlocks and stalls the form of a verdict, with the
line of user code of every rank concerned. Pure; may import every other room of `watchdog/`. Called by the
incident investigation (`runtime/supervisor/incident.py`) once evidence is on disk.
"""
