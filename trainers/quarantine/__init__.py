"""Quarantine: replace prompts on which generation or rewards have failed twice, and leave them out of baseline and loss.

Which prompts they are is decided by the supervisor (`runtime/rollouts/quarantine.py`). May import `rank`, `patches` and
`upstream`, and nothing else of `trainers`. Start reading at `attach.py`, which wraps one method of GRPO's and RLOO's
trainers; `rows.py` decides which rows are replaced.
"""
