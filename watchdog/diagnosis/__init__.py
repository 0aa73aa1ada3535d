"""Diagnosis: turn exits, proved deadlocks, stalls and exhausted memory into verdicts.

Start with `fault.py`: `diagnose` turns everything that was gathered about a fault into its verdict, and shows
in which order diagnoses count. `exits.py` decides which of several failed ranks failed first, and recognizes
those that only lost a connection. `_hangs.py` gives deadlocks and stalls the form of a verdict, with the line
of user code of every rank concerned. Pure; may import every other room of `watchdog/`. Called by
`runtime/supervisor/faults.py` once evidence is on disk.
"""
