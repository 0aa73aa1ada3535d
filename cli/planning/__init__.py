"""`grpo-run plan`: options, what recipes and scripts say of a job, and the output of a prediction.

Imports `trainers.planning`, `trainers.recipes` and `cli.text`. Start at `plan.py`.
"""
