"""Rollouts of GRPO and RLOO trainers: caps, and what several features need.

Start with `capping.py`, which ends completions (`criteria.py`, `deadline.py`, `_rollout.py`; settings in
`caps_settings.py`). `_prompts.py` checks the length of prompts, `generate_calls.py`
changes calls of `generate`, and `counting.py` counts what they return.

`runtime/rank/hooks/_rollout_hooks.py` enters them in their order. Of the rooms below it, imports
`runtime/rank/memory_plan/` only. Generates nothing itself.
"""
