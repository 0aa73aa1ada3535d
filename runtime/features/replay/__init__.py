"""Replay: what `grpo-run replay` compares a step with is kept (`--keep-every`), and the replay itself stops.

`rank.py` writes a line for each step to the run directory (`runtime/history/step_records.py`). In a replay,
which `cli/replay.py` launches, it leaves trackers and the script's saves out, and ends the ranks after the
step. The checkpoints are kept by `runtime/rank/saving/saver.py`.
"""
