"""What explains ranks that have lost their connections, and what does not."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from support.builders.runtime.incident_scene import Scene, exited, record, victim

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.observation import RankError


def test_an_exit_during_the_investigation_counts(scene: Scene) -> None:
    """The victim was observed first; the killed rank is the culprit."""
    scene.further = [exited(1, exit_code=None, signal=signal.SIGKILL)]
    assert scene.investigate(victim(0)).verdict.culprits == (1,)


def test_mismatched_collectives_explain_lost_connections(scene: Scene) -> None:
    """Gloo aborted one side and closed the connections of the other."""
    scene.records[1] = record("all_gather")
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), victim(0))
    assert outcome.verdict.cause is Cause.collective_mismatch
    assert outcome.folder.name == "0001-collective_mismatch"


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


def test_mismatched_collectives_do_not_explain_a_kill(scene: Scene) -> None:
    """A SIGKILL has its own cause."""
    scene.records[1] = record("all_gather")
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL), victim(0))
    assert outcome.verdict.cause is Cause.signal


def test_an_abort_with_matching_collectives_is_a_signal(scene: Scene) -> None:
    """An exited rank does not prove why it exited."""
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), victim(0))
    assert (outcome.verdict.cause, outcome.verdict.culprits) == (Cause.signal, (1,))


def test_a_rank_that_completed_early_is_the_culprit_of_lost_connections(scene: Scene) -> None:
    """It exited with code 0, and only the rank that still needed it failed."""
    outcome = scene.investigate(exited(1, exit_code=0, completed=True), victim(0))
    assert (outcome.verdict.cause, outcome.verdict.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_that_completed_is_not_the_culprit_of_an_exception(scene: Scene) -> None:
    """The exception of another rank is the cause."""
    error = RankError(type="KeyError", message="x", traceback="", location=None, wall_time=1.0)
    outcome = scene.investigate(exited(1, exit_code=0, completed=True), exited(0, error=error))
    assert outcome.verdict.culprits == (0,)
