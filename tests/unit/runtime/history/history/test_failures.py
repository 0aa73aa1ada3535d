"""Lost steps are those after the last checkpoint, and a recovery ends with the next committed step."""

from __future__ import annotations

from support.builders.runtime.journal_records import (
    attempt,
    commit,
    incident,
    replay,
    restored,
    started,
    train,
)


def test_lost_steps_are_those_between_the_checkpoint_and_the_fault() -> None:
    """They are known when the next attempt writes the step that it resumes from."""
    records = [started(0), attempt(1), train(2), commit(3, 7), incident(4, 7)]
    assert replay(*records).recoveries[0].lost_steps is None
    history = replay(*records, attempt(5, 1), train(6, 5))
    assert history.recoveries[0].lost_steps == 2


def test_recovery_time_is_from_the_failure_to_the_next_committed_step() -> None:
    """It starts when the rank failed, not when the failure was detected."""
    history = replay(
        started(0), attempt(1), train(2), commit(3, 7),
        incident(10.5, 7, failed_at=10.0, detection_seconds=0.5),
        attempt(11, 1), train(12, 5), commit(13.25, 6), commit(20, 7),
    )  # fmt: skip
    assert history.recoveries[0].detection_seconds == 0.5
    assert history.recoveries[0].recovery_seconds == 3.25


def test_a_fault_during_a_recovery_leaves_both_unrecovered_until_a_step() -> None:
    """The first restart recovered nothing before a step was committed."""
    history = replay(
        started(0), attempt(1), train(2), commit(3, 7), incident(10, 7),
        attempt(11, 1), incident(12, 0), attempt(13, 2), train(14, 5), commit(15, 6),
    )  # fmt: skip
    assert [recovery.recovery_seconds for recovery in history.recoveries] == [5.0, 3.0]
    assert [recovery.lost_steps for recovery in history.recoveries] == [2, 0]


def test_lost_steps_are_counted_in_the_call_of_the_fault() -> None:
    """A script that trains twice restores its finished first call before the second one resumes."""
    history = replay(
        started(0), attempt(1), train(2, 0, call=1), commit(3, 20, call=1),
        train(4, 0, call=2), commit(5, 5, call=2), incident(6, 5, train_call=2),
        attempt(7, 1), restored(8, 20, call=1), train(9, 3, call=2),
    )  # fmt: skip
    assert history.recoveries[0].lost_steps == 2


def test_a_second_call_without_a_checkpoint_loses_all_its_steps() -> None:
    """It starts over after the first call was restored."""
    history = replay(
        started(0), attempt(1), train(2, 0, call=1), commit(3, 20, call=1),
        train(4, 0, call=2), commit(5, 5, call=2), incident(6, 5, train_call=2),
        attempt(7, 1), restored(8, 20, call=1), train(9, 0, call=2),
    )  # fmt: skip
    assert history.recoveries[0].lost_steps == 5


def test_an_action_belongs_to_the_incident_before_it() -> None:
    """Each incident has its own action."""
    history = replay(
        started(0), incident(1, 0), (1, "action", {"action": "restart"}),
        incident(2, 0), (2, "action", {"action": "stop"}),
    )  # fmt: skip
    assert [recovery.action for recovery in history.recoveries] == ["restart", "stop"]


def test_the_json_object_of_a_recovery() -> None:
    """The keys that status shows."""
    history = replay(started(0), incident(1, 4, incident="incidents/0001-signal"))
    assert history.recoveries[0].as_json() == {
        "cause": "signal", "rank": 1, "step": 4, "action": "", "detection_seconds": None,
        "recovery_seconds": None, "lost_steps": None, "incident": "incidents/0001-signal",
    }  # fmt: skip


def test_injected_faults_are_remembered_over_attempts() -> None:
    """Each one is injected once per run; its text identifies it."""
    history = replay(
        (1.0, "fault_injected", {"injection": "kill@rank1:step7", "rank": 1}),
        attempt(2.0, 1),
        (3.0, "fault_injected", {"injection": "hang@rank0:step9", "rank": 0}),
    )
    assert history.injections_fired == ["kill@rank1:step7", "hang@rank0:step9"]
