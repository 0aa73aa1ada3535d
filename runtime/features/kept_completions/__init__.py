"""Kept completions: the first groups of every rollout stay in the run directory (`--log-completions`).

`rank.py` writes them. `dashboards/live/samples.py` reads them for the live page.
"""
