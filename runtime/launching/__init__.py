"""The composition of processes: which features take part where.

`rank.py` is the entry of a rank, and `preload.py` what the forkserver of the ranks imports. May import
everything in `runtime/`; nothing in `runtime/` imports it.
"""
