"""Rollouts of GRPO and RLOO trainers: caps, sample masking and quarantine.

Start with `capping.py`, which ends completions (`criteria.py`, `deadline.py`, `_rollout.py`; settings in
`caps_settings.py`), and `sample_masking.py`, which leaves samples out of baseline and loss
(`_masking_selection.py` decides which). `quarantine.py` replaces prompts, `_prompts.py` checks their length,
`generate_calls.py` changes calls of `generate`, and `counting.py` counts what they return.

`runtime/rank/hooks/_rollout_hooks.py` enters them in their order. Of the rooms below it, imports
`runtime/rank/memory_plan/` only. Generates nothing itself, and does not choose which prompts are quarantined
(`runtime/supervisor/`).
"""
