"""Proof of deadlocks from the collectives that each rank has enqueued.

Start with `proof.py` (`prove`). Its input is a `Position` per rank (`positions.py`), made of `Collective`
records (`collectives.py`) that come from torch's Flight Recorder (`recording.py`) and from the rank's
collective log, joined by `history.py`. `culprit.py` decides which rank is at fault; `sentences.py` describes
the result for the user. Pure; imports `grpo_run.watchdog.causes`, `verdict` and `rank_names` only.
"""
