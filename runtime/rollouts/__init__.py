"""Rollouts: counts of the samples that a run generates and scores.

Imports nothing of ours. Start reading at `exclusions.py`. Ranks write the events (`trainers/exclusion/`); the history
replays them.
"""
