"""Worker processes of one rank, which run the script's reward functions and can be killed.

Start with `pool.py`, which runs a call in one; `worker_handle.py` is what the rank sees of one. `host.py` forks them,
`keeper.py` ends one with everything that it has started, and `worker.py` runs the function. `packing.py` says what can
travel to a worker. Imports runtime, watchdog and `rewards.deadlines`; what a failed call means is decided in
`rewards.service`.
"""
