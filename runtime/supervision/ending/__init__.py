"""The end of a run: what is still written, which drills never happened, and how the end is described.

Start with `run_end.py`. Part of `supervision`, below it: may import the other packages of `runtime` and
`watchdog`, and of `supervision` only the lifecycle.
"""
