"""Exhausted memory: the exceptions that report it, the kind of memory, the figures, and the phase.

Start with `shortage.py`, which reads all of that from a rank's exception; `error_patterns.py` has the texts and classes that
libraries use, `figures.py` their numbers, `phases.py` the phase that died. Imports `causes` and `observation`. Does not
decide which rank is the culprit (`watchdog.diagnosis`) or what is changed (`runtime.supervision`).
"""
