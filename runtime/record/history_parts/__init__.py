"""Parts of the history: wall time, durations of steps and phases, recoveries.

Each part is filled with the events that concern it, in the order of the journal. Pure. Parts that a run needs to find
its place again, such as its `train()` calls, are in `runtime.continuity`. Start with `recoveries.py`.
"""
