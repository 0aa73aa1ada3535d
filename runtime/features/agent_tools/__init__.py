"""Agent tools: a call of an agent's tool or environment is bounded, and one that is ended is no lesson.

The core names what runs (`runtime/rank/hooks/_tools.py`). `_calls.py` is called in place of each function: it
ends a call that takes too long (`_limits.py` says when, `_interruption.py` how), makes one whose
infrastructure has failed (`_outages.py`) once more, and then leaves its sample out of the loss. `_async.py`
does so in the process that makes AsyncGRPO's rollouts.
`supervisor.py` counts the tools in which attempts have ended; one that has ended two runs in a worker process
of the rank from then on (`_worker.py`), where it can be killed. Other exceptions of a tool are the script's
own: TRL shows them to the model.
"""
