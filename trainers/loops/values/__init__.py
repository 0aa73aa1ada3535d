"""Values: how plain values of a loop's `state` are set again when a checkpoint is loaded.

Imports nothing of ours; imported by `loops/rank_state.py`. Start reading at `in_place.py`.
"""
