"""Proof of deadlocks from the collectives that each rank has enqueued.

Start with `proof.py` (`prove`). Its input is a `Position` per rank (`positions.py`), made of `Collective`
records (`collectives.py`). `recording.py` reads them from torch's Flight Recorder and joins them with the
rank's collective log. `_culprit.py` decides which rank is at fault, and `deadlock.py` is the result with its
sentence for the user. Pure; imports `watchdog/causes.py`, `watchdog/verdict.py` and `watchdog/text.py` at
most.
"""
