"""How the bytes of a board are reached: with read and write calls (`board_file.py`), or through a mapping (`mapped_board.py`).

The supervisor and the commands use calls, the ranks a mapping. Imports `grpo_run.runtime.files` only; `board.py` and the parts of
a board build on it.
"""
