"""Reward service: the user's reward functions in worker processes that can be killed.

A function that sleeps for ever, holds the GIL or crashes then costs its own samples, not the run. Start
with `served.py`, which gives each function a wrapper, and `_service.py`, which decides what a failed call
means. `_pool.py` runs calls in workers, `host.py` forks them, and `_worker.py` runs the function;
`_packing.py` says what can travel to a worker. `_deadlines.py` is pure.

Imports the modules of `runtime/rank/`, `runtime/rank/rollouts/`, the shared rooms and `watchdog/`; no
training library on import. A failed sample gets the reward `-inf`; that it is left out of the loss is
decided in `runtime/rank/rollouts/`.
"""
