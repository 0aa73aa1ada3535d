"""Whether memory grows from step to step, decided from what was alive after each of them.

Start with `growth.py`, which has the numbers (pure). `containers.py` judges what holds many tensors, `keys.py` reads the keys of
dictionaries for it, and `longer_tensors.py` follows tensors that are replaced by longer ones. Imports
`memory_trace` below its tracer.
"""
