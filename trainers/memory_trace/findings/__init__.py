"""Findings of a memory trace: their fields (`finding.py`), how they are made of what was observed, and the sentence of each.

Imports `memory_trace` below its tracer. Start with `finding.py`.
"""
