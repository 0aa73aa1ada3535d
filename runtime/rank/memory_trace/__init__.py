"""Memory trace: name what keeps a script's memory alive, by the line that made it and its holder.

Start with `tracer.py`, which looks at the memory after each step. `_census.py` finds what is alive and since
which step, `_holders.py` and `_referrers.py` find who holds it, and `_sites.py` where it was made.
`_finding.py` has the rule that makes a finding, and its sentences. `allocator_history.py` saves snapshots of
the CUDA allocator.

Imported under `--memory-trace` only. Imports `runtime/history`, `runtime/upstream`, the modules of `runtime/`
and `watchdog/`; torch is used once the script has imported it. Reads no source, and frees nothing.
"""
