"""Rollouts of GRPO and RLOO trainers: what the core and several features need of them.

`generate_calls.py` changes calls of `generate`, `counting.py` counts what they return, and `limits.py` finds
completions that repeat themselves and generations that take too long.
`runtime/rank/hooks/_rollout_hooks.py` puts them, and features, around a trainer's methods.
"""
