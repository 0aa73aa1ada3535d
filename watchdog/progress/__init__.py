"""Progress of steps: where the time goes, whether a step can end, and which rank is late and why.

Start with `step_clock.py`. `late_ranks.py` says what a rank that is regularly late has in common with nothing but data,
hardware or neither. Pure: time is passed in. Imports `observation`, `rank_names`, `duration_text` and `stalls`.
"""
