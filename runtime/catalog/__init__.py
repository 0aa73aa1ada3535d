"""The runs of a user: where they are, what each of them uses, and what can be freed.

Start with `runs.py`, which finds runs. `registry.py` remembers run directories outside `runs/`, and `leftovers.py`
decides what `grpo-run gc` may delete. Imports the record of a run, checkpoints and staging; imported by the
command line only.
"""
