"""The log of the collectives that a rank issues from Python: the wrapped functions, and the content of an entry.

May import `trainers.upstream`, and from outside `runtime.board` and `watchdog`; does not import the rest of
`trainers.rank`. Start reading at `recorder.py`; `own_log.py` is for our own collectives.
"""
