"""What is observed of a run and what it proves: slots, exits, collectives, durations, evidence, verdicts.

The lowest layer: imports nothing else of this project. Start with `observation.py` (what is known of a
rank), `causes.py` and `verdict.py` (the result). `deadlocks/` proves deadlocks, `waits/` that nothing can
wake a rank, and `stalls/` applies deadlines; `memory/` recognizes exhausted memory, `run_processes/` reads
which processes belong to a run, and `evidence/` writes incident files. `diagnosis/` turns all of it into
verdicts.

Decisions are pure functions of observations and of a time that is passed in. Reading /proc and writing
files happens in separate modules. Nothing here terminates a process.
"""
