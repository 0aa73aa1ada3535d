"""Out of memory: change the memory plan, so that the next attempt needs less memory for the same update.

Start with `policy.py`, which decides; `fallback_steps.py` has the fallback steps in order. `returned.py`
waits until GPUs have their memory back. `runtime/supervisor/run_memory.py` acts on the decision. Imports
`runtime/history/`, `runtime/memory/` and `watchdog/`.
"""
