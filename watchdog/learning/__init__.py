"""Learning guards: metrics of training step by step, and when they raise an alarm.

One file per guard; each is a pure function of the observations that are passed in. Start with `judging.py`, which asks
them all; `rules.py` says what follows an alarm. Imports the standard library only. Reads no trainer and stops nothing:
`grpo_run.trainers.learning` observes and acts.
"""
