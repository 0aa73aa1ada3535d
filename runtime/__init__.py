"""The supervisor's half and the contracts both halves share: board, journal, vote, checkpoints, agent.

Imports `grpo_run.watchdog` only. It does not know Trainers, metrics or pages: those are handed in.
"""
