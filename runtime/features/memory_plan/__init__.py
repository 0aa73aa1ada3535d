"""The memory plan: what is changed after a rank has run out of memory, so that the next attempt needs less.

    out-of-memory error → the remedies in order → the first that applies → another plan → another attempt

Start with `_remedies.py`: one class for each change, with all that belongs to it, in the order in which they
are tried. `supervisor.py` answers a fault by `_decision.py`; `events.py` replays the plan. `rank.py` applies
it where trainers are built
(`_configuration.py`). What a script itself has set stays known (`runtime/memory/script_settings.py`).
"""
