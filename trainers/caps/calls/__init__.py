"""Calls of transformers' `generate`: what the caps and the memory plan add to those of a trainer's turn.

`generation.py` wraps the method, `parts.py` divides a call and joins its results. Imports `caps.criteria`; imported by `caps`,
`memory_plan` and `hooks`. Start reading at `generation.py`.
"""
