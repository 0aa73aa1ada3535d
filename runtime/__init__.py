"""The supervisor's side of grpo-run, and what supervisor and ranks share.

Start with `supervision/`. Packages import only those below them: supervision, launch, staging, detection,
record, checkpoints, processes, board, then `files.py`, `errors.py` and `upstream.py`. May import
`grpo_run.watchdog` and nothing else of ours; trainers, metrics and pages are passed in by the command line.
"""
