"""Helpers of the tests.

Start with `runs.py`, which starts real runs, and `warm.py`, which makes that fast. What unit tests share is
in `builders`."""
