"""Phase growth: a phase of a step that costs more and more for the same work is told, once.

`rank.py` measures what the phases cost in rank 0, and `_watch.py` has the rule. Never a fault: nothing is
changed, and no run is ended.
"""
