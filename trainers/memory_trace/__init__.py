"""Memory trace: names what keeps memory of a script alive, by the line that made it and the object that holds it.

Start with `tracer.py`, which looks at the memory after each step. `census.py` finds what is alive, `ledger.py` keeps since which
step, `growing/` decides whether it grows, `holding/` finds who holds
it, `sites.py` where it was made, and `findings/` says so. `snapshots/` has the history of the CUDA allocator. Only imported under `--memory-trace`. Imports `trainers.upstream` and `watchdog` only; torch is used once the script has imported it.
"""
