"""Faults to inject on request (`--inject`): their kinds, the value, its text, and which of them are left in a run.

Start with `kinds.py`, the table of what can be injected; `injection.py` is one fault with its rank, step and phase, and
`parsing.py` reads the text. Pure: the faults happen in `trainers/rank/injected/`.
"""
