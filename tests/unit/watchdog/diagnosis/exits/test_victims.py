"""Which errors say only that a peer has gone."""

from __future__ import annotations

import pytest
from support.builders.watchdog.failed_ranks import PEER_GONE, diagnose, make_error, make_exit

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import is_victim, reports_lost_peer


@pytest.mark.parametrize(
    "message",
    [
        PEER_GONE,
        "Gloo connectFullMesh failed with [..] no error",
        "Application timeout caused pair closure; Socket timeout",
        "NCCL communicator was aborted on rank 3",
        "The client socket has timed out; DistNetworkError",
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
            " prematurely."
        ),
    ],
)
def test_errors_of_the_collective_mark_a_victim(message: str) -> None:
    """torch's messages for a peer that has exited."""
    assert is_victim(make_exit(0, error=make_error(type="DistBackendError", message=message)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "bad reward"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("TimeoutError", "timed out"),
    ],
)
def test_other_errors_do_not_mark_a_victim(kind: str, message: str) -> None:
    """Their messages do not report a peer that has exited."""
    assert not is_victim(make_exit(0, error=make_error(type=kind, message=message)))


NESTED = """\
Traceback (most recent call last):
  File "train.py", line 5, in step
    work.wait()
RuntimeError: Connection closed by peer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in cleanup
    raise KeyError(name)
"""


@pytest.mark.parametrize(
    ("last", "lost"),
    [
        (f"RuntimeError: {PEER_GONE}", True),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1\nncclRemoteError: A call failed", True),
        ("RuntimeError: Connection closed by peer\n[rank0] output of an exit handler", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("ValueError: bad", False),
        ("RuntimeError", False),
        ("", False),
    ],
)
def test_a_printed_traceback_is_judged_by_its_last_error(last: str, lost: bool) -> None:
    """The same rule as for error files; what precedes the exception does not matter."""
    assert reports_lost_peer((NESTED + last).splitlines()) is lost
    assert not reports_lost_peer([])


def test_a_rank_without_an_error_is_no_victim() -> None:
    """Without an error record nothing shows that a peer exited."""
    assert not is_victim(make_exit(0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
    ],
)
def test_a_lost_reward_server_is_an_error_of_its_own(kind: str, message: str) -> None:
    """A reward function that loses its HTTP server is the cause; no other node is blamed."""
    exits = [make_exit(0, error=make_error(type=kind, message=message))]
    verdict = diagnose(*exits)
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 0)


@pytest.mark.parametrize(
    ("traceback", "lost"),
    [
        (["RuntimeError: Connection closed by peer"], True),
        (['  File "<string>", line 1, in <module>', "RuntimeError: Connection closed by peer"], True),
        (
            [
                '  File "a.py", line 1, in f',
                "    g()",
                "RuntimeError: no answer:",
                "Connection closed by peer",
            ],
            True,
        ),
        (['  File "a.py", line 1, in f', '    raise Error("Broken pipe")', "RuntimeError: bad"], False),
        (["", '  File "a.py", line 1, in f', '    raise Error("Broken pipe")', "RuntimeError: bad"], False),
        (["RuntimeError: Broken pipe", '  File "a.py", line 1, in f', "    g()", "RuntimeError: bad"], False),
    ],
)
def test_only_the_error_itself_and_what_follows_says_that_a_peer_exited(
    traceback: list[str], lost: bool
) -> None:
    """Not the script's source lines, which a traceback quotes; a frame may have none."""
    assert reports_lost_peer(traceback) is lost
