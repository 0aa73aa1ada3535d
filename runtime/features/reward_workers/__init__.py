"""Reward workers: the user's reward functions in worker processes, where a call can be ended.

    a call fails twice in the rank at one step → the next attempt runs the function in a worker

A function that sleeps for ever, holds the GIL or crashes then costs its own samples, not the run; all
functions run in workers from the start if the user asks for it. `events.py` replays which functions were
moved; `supervisor.py` moves a function after its second failure.

In the rank (`rank.py`), start with `_served.py`, which says what is called in place of a function, and
`_service.py`, which decides what a failed call means. `_pool.py` runs calls in workers, `_host.py` forks
them, and `_worker.py` runs the function; `_packing.py` says what can travel to a worker. `_deadlines.py` is
pure. A failed sample gets the reward `-inf`; that it is left out of the loss is decided where rewards are
combined.
"""
