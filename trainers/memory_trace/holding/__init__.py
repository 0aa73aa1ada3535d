"""Who holds a tensor: objects that refer to it, directly or through others, and the name that the script has for them.

Start with `holders.py`, which finds the object that accumulates tensors. `referrers.py` goes from a tensor to its owners through
`gc`, `names.py` names an object as the script does, `numbered_attributes.py` attributes that are made in each step, `sources.py` reads where it is assigned,
`script_files.py` where the script sets it from outside and whether a loop makes it anew, `bounds/` whether code bounds it,
`length_arguments.py` reads what has chosen the length of a batch,
`cycles.py` proves that only a reference cycle holds something, and `tracebacks.py` finds what kept exceptions hold. Imports
`memory_trace.census` and `watchdog.evidence` only.
"""
