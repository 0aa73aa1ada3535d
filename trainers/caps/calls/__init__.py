"""Calls of transformers' `generate`: the additions of the caps and of the memory plan.

`generation.py` wraps the method, `parts.py` divides a call and joins its results. Imports `caps.criteria`; imported by `caps`,
`memory_plan` and `hooks`. Start reading at `generation.py`.
"""
