"""Accounting on the board: the area of a rank that holds its memory by phase.

Written by the rank, read by the supervisor, the metrics and `grpo-run status`, also after the rank's death. Start with
`memory_area.py`. Imports `grpo_run.watchdog` only.
"""
