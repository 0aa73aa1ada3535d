"""Injections: faults that `--inject` causes in a rank, once in a run, to see how the run recovers.

    command line → each rank, at its phase and step → journal, on disk → the fault

`_faults.py` is the table of kinds, with what each does; `_injection.py` reads the text of the options.
`rank.py` decides when a fault is due; `_exhaustion.py` finds the places at which memory can run out.
`events.py` replays which have happened, and `supervisor.py` tells the ranks of the next attempt, and names at
the end of the run what never happened.
"""
