"""Sample masking: samples without a valid reward, and rows that other features take out, leave baseline,
advantages and loss of GRPO and RLOO trainers.

`rank.py` puts `_masking.py` around a trainer's rewards and the scoring of its rollouts. `_outputs.py` checks
what a reward function returned, `_selection.py` decides which samples leave, `_report.py` tells the user and
the journal, and `_repeated.py` reads what earlier attempts have told it, so that a step that is done again
loses the same samples.
"""
