"""What is observed of a run and what it proves: slots, exits, collectives, durations, evidence and verdicts.

The lowest layer: imports nothing else of this project. Start with `observation.py` (what is known of a rank),
`causes.py` and `verdict.py` (the result). `deadlocks/` proves deadlocks, `stalls/` applies deadlines,
`evidence/` writes incident files, and `diagnosis/` turns exits, deadlocks and stalls into verdicts; it may
import the other three. Decisions are pure functions of observations and of a time that is passed in; reading
/proc and writing files happens in separate modules.
"""
