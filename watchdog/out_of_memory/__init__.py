"""Exhausted memory: which exceptions report it, of which kind of memory, with which figures, and in which phase.

Start with `shortage.py`, which reads all of that from a rank's exception; `spellings.py` has the texts and classes that
libraries use, `figures.py` their numbers, `phases.py` the phase that died. Imports `causes` and `observation`. Does not
decide which rank is the culprit (`watchdog.diagnosis`) or what is changed (`runtime.supervision`).
"""
