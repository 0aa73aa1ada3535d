"""Trackers go on after a restart: the run that a tracker opened in an earlier attempt is continued.

wandb, trackio and MLflow name each run that they open anew, and transformers' TensorBoard callback names its
folder by the time, so every restart would be another run there. Rank 0 journals the name of each run that is
opened outside of a step (`rank.py`); `events.py` replays the names, and `supervisor.py` passes them to the
next attempt.
"""
