"""Phase growth: phases of a step that cost more and more for the same work are told, with what grew.

`rank.py` measures what the phases cost in rank 0, and asks `_watch.py` after each block of steps. What is
found is printed, journaled once (`events.py`), and shown by `grpo-run status`, the report and the metrics.
Never a fault: nothing is changed, and no run is ended.
"""
