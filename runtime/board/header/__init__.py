"""The header of a board: the attempt, requests to the ranks and to the supervisor, and two fields of text.

Start with `header.py`. `awaited_field.py` says which rank the others wait for, and `disagreement_field.py` what was
proved of ranks that do not make the same calls. Imports `watchdog` only; `board.py` builds on it.
"""
