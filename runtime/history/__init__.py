"""Run state and history: the run directory, the journal, and what is derived from them.

Start with `run_directory.py` for the layout and `history.py` for what the journal's events mean;
`progress.py` has what it counts. `lifecycle.py` is the table of states, `train_calls.py` the ledger of
the run's calls, `recovery.py` the data of faults and decisions, and `checkpoint_backups.py` keeps
checkpoints while a script clears its output directory. `reporter.py` writes events, and `status.py`
combines the history with the live board.

Read and written by the supervisor and the ranks, read by commands and dashboards. Imports `watchdog/`,
`runtime/board/`, `runtime/checkpoints/`, `runtime/memory/`, `runtime/processes/` and the modules of
`runtime/`. Takes no decision.
"""
