"""Helpers of the integration, fault and browser tests.

Start with `runs.py`, which starts real runs, and `warm.py`, which makes that fast."""
