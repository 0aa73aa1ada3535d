"""Quarantine of prompts in the supervisor: the suspected rollout, the prompts to replace, and the user's file.

May import `record`, `rollouts` and the supervisor's `attempt`; used by `faults.py` and `supervisor.py`. Start reading at
`run_quarantine.py`.
"""
