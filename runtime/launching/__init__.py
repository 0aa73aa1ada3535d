"""The composition of processes: which features take part where.

`rank.py` is the entry of a rank. May import everything in `runtime/`; nothing in `runtime/` imports it.
"""
