"""The record of a run on disk and in memory: run directory, journal, and what is derived from them.

Start with `run_directory.py` for the layout and `history.py` for what the journal's events mean (`history_parts/` has
what it counts by itself); `status.py` combines both with the live board, and `summary.py` says it in one sentence. May
import `board/`, `files.py`, `errors.py` and `watchdog`. Takes no decision.
"""
