"""Learning guards: a run whose learning fails is warned, stopped, or rolled back to before the onset.

    each step → observations → guard trips → warning, or: all ranks end the attempt → exact repetition → fresh
    seeds → stop

`rank.py` reads each step and asks the guards (`_judge.py`). Rank 0 reports a trip whose response is a
warning. Any other one goes into the step's vote: all ranks end, and the supervisor gets the trip in the
rank's error file. `supervisor.py` answers it: an exact repetition from before the onset, in case it was
transient (a flipped bit, a value from a service); if that ends the same way, one with fresh seeds, which
`rank.py` sets; then the end of the run. `events.py` has what the journal says, and what is counted.
"""
