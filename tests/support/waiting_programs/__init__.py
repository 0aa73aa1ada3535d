"""Small programs that wait, each in its own way: hung for good, until a known time, or for something alive.

Run as `python -m support.waiting_programs NAME [ARGUMENT]`. Each starts a thread like a rank's heartbeat,
prints that thread's native id and the ids of idle library threads in one line, and waits. Used by
`tests/integration/test_wait_states.py`.
"""

from support.waiting_programs import alive, hung  # noqa: F401 - they register their programs
