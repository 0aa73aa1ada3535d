"""Ownership of staging areas: which run an area in shared memory belongs to, and which areas can be removed.

`acquisition.py` gives a run its area, under a random name that `run.json` holds; `owner.py` records and locks it;
`leftovers.py` lists and removes what is left, for `grpo-run gc`. Imports `runtime.files` and
`watchdog.processes`. Start with `acquisition.py`.
"""
