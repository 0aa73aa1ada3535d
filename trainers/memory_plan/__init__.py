"""The memory plan in a rank: changes of a trainer's configuration and calls, and the facts that ranks publish about memory.

`configuration.py` applies the plan when a script builds a configuration, `record.py` keeps what the script had set, and
`derivation.py` tells from which other one it was built; `sub_batches.py` splits calls of generation; `facts.py` collects what the supervisor must know to choose a plan. May import
`rank`, `patches`, `upstream`, `runtime` and `watchdog`. Start reading at `configuration.py`.
"""
