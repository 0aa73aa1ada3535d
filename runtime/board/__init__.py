"""The board: one file with one fixed-size slot per local rank.

Ranks write their own slots; the supervisor, `grpo-run status` and the metrics read them, also after a rank's
death. Start with `board.py` (the file), then `file_layout.py` and `slot_layout.py` (what is where in the file, and in a
slot). `slot_writer.py` is the rank's side, `slot_reading.py` the reader's, `storage/` reads and writes the bytes, and `header/` has the requests;
`collective_log.py` and `phase_histogram.py` are the two larger areas of a slot. In `exchange.py` the ranks of one node
send messages to each other. Imports `grpo_run.watchdog` and `grpo_run.runtime.errors` only.
"""
