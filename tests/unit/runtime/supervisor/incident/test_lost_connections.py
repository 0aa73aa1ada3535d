"""What explains ranks that have lost their connections, and what does not."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from support.builders.runtime.incident_scene import Scene, exited, record, victim

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.observation import Exit, RankError

ABORTED = exited(1, exit_code=None, signal=signal.SIGABRT)
KILLED = exited(1, exit_code=None, signal=signal.SIGKILL)
COMPLETED = exited(1, exit_code=0, completed=True)
RAISED = RankError(type="KeyError", message="x", traceback="", location=None, wall_time=1.0)


def test_an_exit_during_the_investigation_counts(scene: Scene) -> None:
    """The victim was observed first; the killed rank is the culprit."""
    scene.further = [exited(1, exit_code=None, signal=signal.SIGKILL)]
    assert scene.investigate(victim(0)).verdict.culprits == (1,)


@pytest.mark.parametrize(
    ("operation", "exits", "cause", "culprits"),
    [
        ("all_gather", [ABORTED, victim(0)], Cause.collective_mismatch, None),
        ("all_gather", [KILLED, victim(0)], Cause.signal, (1,)),
        ("all_reduce", [ABORTED, victim(0)], Cause.signal, (1,)),
        ("all_reduce", [COMPLETED, victim(0)], Cause.rank_exited_early, (1,)),
        ("all_reduce", [COMPLETED, exited(0, error=RAISED)], Cause.startup_failure, (0,)),
    ],
    ids=["mismatch", "a kill has its own cause", "an abort alone", "left early", "an exception"],
)
def test_what_explains_lost_connections(
    scene: Scene, operation: str, exits: list[Exit], cause: Cause, culprits: tuple[int, ...] | None
) -> None:
    """Gloo aborts one side of mismatched collectives and closes the connections of the other. An exited rank
    does not prove why it exited, and one that has completed is to blame only if another still needed it.
    """
    scene.records[1] = record(operation)
    outcome = scene.investigate(*exits)
    assert outcome.verdict.cause is cause
    assert culprits is None or outcome.verdict.culprits == culprits
    assert outcome.folder.name == f"0001-{cause}"


def test_a_rank_that_exits_before_it_answers_is_judged_by_its_collective_log(scene: Scene) -> None:
    """The other rank aborted, which broke its connection."""
    scene.records[1] = record("all_gather")
    ranks = SimpleNamespace(alive={1: 100})  # rank 0, at place 1

    def positions(slots: Any, exited: dict[int, bool]) -> dict[int, Position]:
        found = scene._positions(slots, exited)
        if not exited[0]:
            found[0] = Position(rank=0, records=None, exited=False)
            ranks.alive = {}  # it has exited by the time its exit is waited for
        return found

    scene.watch.positions = positions
    scene.further = [victim(0)]
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), ranks=ranks)
    assert outcome.verdict.cause is Cause.collective_mismatch
    assert scene.done == ["positions", "evidence", "exits", "positions"]
