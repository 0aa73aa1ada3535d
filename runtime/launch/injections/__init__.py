"""Faults to inject on request (`--inject`): their kinds, values and text form, and which of them remain in a run.

Start with `kinds.py`, the table of what can be injected; `injection.py` is one fault with its rank, step and phase, and
`parsing.py` reads the text. Pure: the faults happen in `trainers/rank/injected/`.
"""
