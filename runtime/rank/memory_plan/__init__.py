"""What a memory plan changes in a rank, and what a `train()` call tells the supervisor of its memory.

`configuration.py` applies the plan where a trainer is built and checks it at `train()`, `deepspeed.py` does
so in DeepSpeed's configuration, and `settings.py` keeps what the script had set. `facts.py` publishes the
facts of a call. Called by `runtime/rank/hooks/` and `runtime/rank/loops/`.
"""
