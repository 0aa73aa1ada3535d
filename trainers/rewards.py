"""Reward service: the user's reward functions in worker processes that can be killed.

A function that sleeps for ever, holds the GIL or crashes then costs its own samples, not the run. Start at `served.py`,
which gives each function a wrapper, and `service.py`, which decides what a failed call means; the processes are in
`workers/`. `bisection.py` and `deadlines.py` are pure. Imports `rank`, runtime and watchdog; no training library when it is
imported. A sample that failed gets the reward `-inf`; that it is left out of the loss is not decided here.
"""

from __future__ import annotations

from grpo_run.runtime.rank.rewards.batch import whole_batch

__all__ = ["whole_batch"]
