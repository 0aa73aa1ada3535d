"""Memory trace: name what keeps a script's memory alive, by the line that made it and its holder.

Start with `tracer.py`, which looks at the memory after each step. `census.py` finds what is alive and since
which step, `growth.py` decides whether it grows, `holders.py`, `names.py` and `referrers.py` find who holds
it, and `sites.py` where it was made. `cycles.py`, `kept_exceptions.py` and `padding.py` look for one mistake
each. `finding.py` makes findings and their sentences. `allocator_history.py` saves snapshots of the CUDA
allocator.

Imported under `--memory-trace` only. Imports `runtime/history`, `runtime/upstream`, the modules of `runtime/`
and `watchdog/`; torch is used once the script has imported it. Reads no source, and frees nothing.
"""
