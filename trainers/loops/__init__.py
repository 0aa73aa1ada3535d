"""Loops: the implementation of `trainers/loop.py`, which gives hand-written loops what a guarded `train()` call has.

`run.py` is one loop of one attempt: it resumes, commits steps and ends; `plain.py` only counts. What it saves is in `contents.py`: the script's
objects (`state.py`, `sharding.py`), and per rank the random generators, plain values and the position in the data
(`rank_state.py`, `data_position.py`). `optimizers.py` observes the optimizers' steps, `leaving.py` tells `break` from
exceptions, `logs.py` takes what `loop.log` is given. `plain.py` is a loop outside `grpo-run launch`. Imports `calls`, `saving`, `exact` and `rank`; imported by `loop`. Start reading at `run.py`.
"""
