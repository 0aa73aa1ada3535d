"""The board: one file with one fixed-size slot per local rank.

Ranks write their own slots; the supervisor, `grpo-run status` and the metrics read them, also after a
rank's death. Start with `board.py` (the file), then `_slot_layout.py` (what is where in a slot) and
`watchdog/rank_metrics.py` (the table of what ranks publish).
`slot_writer.py` is the rank's side, `_storage.py` reads and writes the bytes, `_header.py` has the requests,
and `collective_log.py`, `_duration_table.py` and `memory_area.py` are larger areas. In `exchange.py` the
ranks of one node send messages to each other. Imports `watchdog/`, `runtime/errors.py` and
`runtime/files.py`. Interprets nothing.
"""
