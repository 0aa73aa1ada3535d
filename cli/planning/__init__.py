"""`grpo-run plan`: options, the job that is asked for, and the output of a prediction.

Imports `reading`, `trainers.planning` and `cli.text`. Start at `plan.py`.
"""
