"""A finding of the watchdog is the verdict."""

from __future__ import annotations

import dataclasses

import pytest
from support.builders.runtime.incident_scene import Scene, record

from grpo_run.runtime.supervisor import incident
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CONSENSUS_GROUP
from grpo_run.watchdog.deadlocks.deadlock import Deadlock


def test_a_proved_deadlock_is_the_verdict(scene: Scene) -> None:
    """It was found before any rank exited."""
    deadlock = Deadlock(
        cause=Cause.collective_missing_rank, culprits=(0,), waiters=(1,), at={}, locations={}, mismatch=None,
        sentence="Deadlocked.",
    )  # fmt: skip
    outcome = scene.investigate(finding=HangFinding(deadlock=deadlock, began_at_seconds=0.0))
    assert (outcome.verdict.cause, outcome.verdict.confidence) == (Cause.collective_missing_rank, "proved")


@pytest.mark.parametrize("group", [CONSENSUS_GROUP, "0"])
def test_a_rank_in_a_consensus_call_is_told_and_the_other_ones_log_says_it(
    scene: Scene, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first raises it; the other sits in torch. Nothing is said where no rank is in a consensus call."""
    at = {0: dataclasses.replace(record("all_gather"), group=group), 1: record("barrier")}
    deadlock = Deadlock(
        cause=Cause.collective_missing_rank, culprits=(1,), waiters=(0,), at=at, locations={}, mismatch=None,
        sentence="Deadlocked.",
    )  # fmt: skip
    finding = HangFinding(deadlock=deadlock, began_at_seconds=0.0)
    told: list[str] = []
    monkeypatch.setattr(scene.board, "publish_disagreement", told.append)
    context = scene.context(finding=finding)
    assert context.attempt.files.make() is None
    incident.tell_ranks(context, scene.investigate_in(context).verdict)
    logs = {rank: context.attempt.files.log(rank) for rank in (0, 1)}
    assert not logs[0].exists()
    if group == CONSENSUS_GROUP:
        assert told == ["Deadlocked."]
        assert logs[1].read_text() == "Ended by grpo-run: Deadlocked.\n"
    else:
        assert told == []
        assert not logs[1].exists()


def test_a_slow_stop_has_no_culprit(scene: Scene) -> None:
    """No rank failed and no hang was found."""
    outcome = scene.investigate(stop_seconds=30.0)
    assert (outcome.verdict.culprits, outcome.verdict.cause) == ((), Cause.stopped)
    assert "30 s" in outcome.verdict.sentence
