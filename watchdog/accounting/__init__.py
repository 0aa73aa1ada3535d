"""Accounting: how much memory a rank uses, by the phases of its steps.

Plain data, filled by `runtime.board.accounting` and read by metrics, `grpo-run status` and the evidence of incidents.
Start with `phase_memory.py`. Imports `grpo_run.watchdog.observation` only.
"""
