"""`grpo-run plan`: its options, the requested job, and the output of a prediction.

Imports `reading`, `trainers.planning` and `cli.text`. Start at `plan.py`.
"""
