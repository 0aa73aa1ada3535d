"""Exclusion: leave samples without a valid reward, and completions cut by a cap, out of baseline and loss.

May import `rank`, `patches`, `async_functions` and `upstream`, and nothing else of `trainers`. Start reading at `attach.py`,
which wraps two methods of GRPO's and RLOO's trainers; `selection.py` decides which samples leave, `masking.py` takes them
out of the loss. What a reward function returns is checked in `outputs.py`.
"""
