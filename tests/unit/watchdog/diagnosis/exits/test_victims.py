"""Which errors say only that a peer has gone."""

from __future__ import annotations

import pytest
from support.builders.watchdog.failed_ranks import PEER_GONE, diagnose, make_error, make_exit

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import is_victim


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
