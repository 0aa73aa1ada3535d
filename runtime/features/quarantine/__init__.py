"""Quarantine: prompts on which generation or rewards failed twice at one step are replaced by others.

    first fault → the next attempt records the prompts of that rollout → the same fault again → quarantine

`supervisor.py` puts the prompts of the rank that failed into quarantine where the run would otherwise be
given up, and journals it; `events.py` replays that. `rank.py` replaces the prompts in rollouts, and the
samples are left out of the loss. The user can take prompts out again: they are in `quarantine.json` of the
run directory (`_files.py`), which every attempt reads.
"""
