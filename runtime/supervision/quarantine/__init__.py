"""Quarantine of prompts, as the supervisor sees it: which rollout is suspected, which prompts leave, and the user's file.

May import `record`, `rollouts` and the supervisor's `attempt`; used by `faults.py` and `supervisor.py`. Start reading at
`run_quarantine.py`.
"""
