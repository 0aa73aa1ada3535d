"""A rank without memory is named, although its peers have exited first or wait for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from typing import Any

import pytest
from support.builders.runtime.incident_scene import Scene, exited, stall, victim

from grpo_run.runtime.supervisor.incident import IncidentContext
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.observation import Exit, Phase, RankError

OUT_OF_MEMORY = {
    "type": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2.00 GiB.", "traceback": "",
    "location": None, "wall_time": 2.0, "phases": [Phase.generate],
    "chain": [{"types": ["torch.OutOfMemoryError"],
    "message": "CUDA out of memory. Tried to allocate 2.00 GiB."}],
}  # fmt: skip


def write_error_of(context: IncidentContext, rank: int, value: dict[str, Any]) -> None:
    """A rank has written its error, and has not exited yet."""
    context.attempt.files.make()
    context.attempt.files.error(rank).write_text(json.dumps(value))


@pytest.mark.parametrize("aborted", [True, False])
def test_a_rank_without_memory_is_named_although_its_peers_have_exited_first(
    scene: Scene, aborted: bool
) -> None:
    """It still runs its exit handlers; the peer lost its connection, or was aborted by NCCL's watchdog."""
    peer = exited(0, exit_code=None, signal=signal.SIGABRT) if aborted else victim(0)
    context = scene.context(peer)
    write_error_of(context, 1, OUT_OF_MEMORY)
    verdict = scene.investigate_in(context).verdict
    assert (verdict.cause, verdict.culprit, verdict.phase) == (Cause.gpu_oom, 1, "generate")


def test_a_rank_that_raised_is_named_although_its_peer_has_exited_first(scene: Scene) -> None:
    """Otherwise the fault would seem to be on another node."""
    context = scene.context(victim(0))
    write_error_of(context, 1, OUT_OF_MEMORY | {"type": "ValueError", "message": "bad", "chain": []})
    verdict = scene.investigate_in(context).verdict
    assert (verdict.cause, verdict.culprit) == (Cause.startup_failure, 1)


def test_a_rank_that_exits_with_a_code_is_not_named_before_its_exit_is_seen(scene: Scene) -> None:
    """`sys.exit(0)` writes an error, too."""
    context = scene.context(victim(0))
    write_error_of(context, 1, OUT_OF_MEMORY | {"type": "SystemExit", "message": "0", "chain": []})
    assert scene.investigate_in(context).verdict.cause is Cause.unknown


def test_a_rank_that_the_kernel_is_killing_is_named_although_its_peer_fails_for_want_of_memory_first(
    scene: Scene,
) -> None:
    """A large process takes seconds to free its memory. Its exit is waited for."""
    short = RankError(type="MemoryError", message="", traceback="", location=None, wall_time=1.0)
    scene.slow = [exited(1, exit_code=None, signal=signal.SIGKILL)]

    def kills_of(exits: Collection[Exit]) -> KernelKills:
        seen = {one.rank for one in exits}
        return KernelKills(ranks=frozenset({1} & seen), dying=frozenset({1} - seen), before=0, now=1)

    verdict = scene.investigate(exited(0, error=short), kills_of=kills_of).verdict
    assert (verdict.cause, verdict.culprits) == (Cause.host_oom, (1,))
    assert "rose from 0 to 1" in verdict.sentence


def test_ranks_that_wait_for_a_rank_without_memory_do_not_hang(scene: Scene) -> None:
    """They are found to wait while it still ends."""
    context = scene.context(finding=stall())
    write_error_of(context, 0, OUT_OF_MEMORY)
    verdict = scene.investigate_in(context).verdict
    assert (verdict.cause, verdict.culprit) == (Cause.gpu_oom, 0)
