"""Memory trace: name the container of a script that holds tensors of ever more steps.

`_tracer.py` looks after each step which tensors are alive, and has the rule; `_holders.py` finds the
container and its name. `rank.py` connects them to the rank under `--memory-trace`, and imports them only
then. `events.py` has the findings of all ranks, which `status` and reports list, also that of an
out-of-memory fault; `supervisor.py` prints them. Frees nothing, and reads no source.
"""
