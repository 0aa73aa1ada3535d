"""Rollouts of GRPO and RLOO trainers: caps and sample masking.

Start with `capping.py`, which ends completions (`criteria.py`, `deadline.py`, `_rollout.py`; settings in
`caps_settings.py`), and `sample_masking.py`, which leaves samples out of baseline and loss
(`_masking_selection.py` decides which). `_prompts.py` checks the length of prompts, `generate_calls.py`
changes calls of `generate`, and `counting.py` counts what they return.

`runtime/rank/hooks/_rollout_hooks.py` enters them in their order. Generates nothing itself.
"""
