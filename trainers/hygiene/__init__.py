"""Hygiene: free unused memory, at the same step on every rank, when it is worth the time.

Start with `hygiene.py`, which `calls/steps.py` uses after each step. `policy.py` decides what a rank needs, `cleaning.py` does it,
and `automatic.py` keeps Python's automatic garbage collection out of the phases of a step. Imports
`grpo_run.trainers.accounting`, `grpo_run.runtime.board` and `grpo_run.watchdog` only.
"""
