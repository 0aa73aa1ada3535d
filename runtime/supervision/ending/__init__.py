"""The end of a run: final writes, injected faults that never happened, and the description of the outcome.

Start with `run_end.py`. Part of `supervision`, below it: may import the other packages of `runtime` and
`watchdog`, and of `supervision` only the lifecycle.
"""
