"""The memory plan in a rank: what of a trainer's configuration it changes, and what the ranks tell of their memory.

`facts.py` collects what the supervisor must know to choose a plan. May import `exact`, `saving`, `rank`, `patches`, `upstream`,
`runtime` and `watchdog`. Start reading at `facts.py`.
"""
