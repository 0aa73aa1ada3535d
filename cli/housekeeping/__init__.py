"""Commands for all runs of a user: `ls`, `rm`, `gc` and `resume`.

One file per command. What is found and what may be deleted is decided in `runtime.catalog`; the commands print and
act. `removal.py` deletes a run directory. Start at `gc.py`.
"""
