"""What is observed of a run, and what it proves: slots, exits, causes, verdicts, evidence, incident files.

The lowest layer: imports nothing of ours. Decisions here are pure functions of observations and a
clock that is passed in; reading `/proc` and writing incident files is kept in files of its own.
"""
