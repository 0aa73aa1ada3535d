"""Values: restore the plain values of a loop's `state` when a checkpoint is loaded.

Imports nothing of ours; imported by `loops/rank_state.py`. Start reading at `in_place.py`.
"""
