"""The log of the collectives that a rank issues from Python: what is wrapped, and what an entry says.

May import `trainers.upstream`, and from outside `runtime.board` and `watchdog`; does not import the rest of
`trainers.rank`. Start reading at `recorder.py`; `own_log.py` is for our own collectives.
"""
