"""How steps proceed: where the time of a step goes, whether it can end, and which rank is late and why.

Start with `step_clock.py`. `late_ranks.py` says what a rank that is regularly late has in common with nothing but data,
hardware or neither. Pure: time is passed in. Imports `observation`, `rank_names`, `duration_text` and `stalls`.
"""
