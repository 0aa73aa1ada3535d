"""GRPO, RLOO and SFT training on TRL, supervised. The packages are `cli`, `dashboards`, `trainers`, `runtime`
and `watchdog`; scripts import `grpo_run.trainers`.
"""
