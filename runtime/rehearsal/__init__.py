"""Rehearsal: short runs of the user's own job, each with one fault, compared with the undisturbed job.

Start with `rehearse.py`, which decides what is run in which order and fits in the time. `drills.py` has the
faults and what is expected of each, `_seen.py` what was seen of a run, `judgement.py` what that means for the
job, and `children.py` starts launches and ends what they leave. What the ranks of these runs do differently
is in `runtime/launch/rehearsal.py` and in the feature `rehearsal`. Called by `cli/rehearse.py`.
"""
