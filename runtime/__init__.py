"""What supervises a run, what runs inside its ranks, and what both share.

Start with `supervisor/` (one process per node, outside the ranks) and `rank/` (inside each rank). They
import the shared rooms and never each other: they communicate through `board/`, the journal and run state
in `history/`, and `snapshots/`. Further shared rooms: `launch/` and `planning/` at the top, then `memory/`,
`checkpoints/`, `processes/` and `upstream/`. At the bottom are `files.py`, `errors.py` and `call_names.py`.
`catalog.py` and `registry.py` are about all runs of a user.

May import `watchdog/` and nothing else of this project; dashboards and the terminal are passed in by the
command line.
"""
