"""Memory trace: name what keeps a script's memory alive, by the line that made it and its holder.

Start with `tracer.py`, which looks at the memory after each step. `census.py` finds what is alive,
`ledger.py` since which step, `growth.py`, `containers.py` and `longer_tensors.py` whether it grows,
`holders.py`, `referrers.py` and `names.py` who holds it, `container_bounds.py` and `tensor_bounds.py`
whether code bounds it, and `sites.py` where it was made. `making.py` makes findings (`finding.py`).
`allocator_history.py` saves snapshots of the CUDA allocator.

Imported under `--memory-trace` only. Imports `runtime/upstream/`, the modules of `runtime/` and
`watchdog/`; torch is used once the script has imported it. Reads sources, executes nothing of them, and
frees nothing.
"""
