"""The kinds of `odd_loops.py`."""
