"""Snapshots of the CUDA allocator for PyTorch's viewer, with the history of its allocations in a ring buffer.

Start with `history.py`, which records and saves. `policy.py` decides when and shortens what is too long (pure), `allocator.py` is
the allocator of CUDA behind an interface. Imports `runtime.files` and `trainers.upstream`; without CUDA nothing of it acts.
"""
