"""Rollback after a learning guard has tripped: whether, how often, and to which checkpoint.

`policy.py` decides, `setting_aside.py` takes the checkpoints from the onset on out of use. Called by the supervisor and
its policy; imports nothing else of `supervision`.
"""
