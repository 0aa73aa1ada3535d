"""The record of a run on disk and in memory: run directory, journal, and what is derived from them.

Start with `run_directory.py` for the layout and `history.py` for what the journal's events mean; `status.py`
combines both with the live board. May import `board/`, `files.py`, `errors.py` and `watchdog`. Takes no
decision.
"""
