"""What a journal says about its run: its state, its checkpoints, its faults, its goodput and its pace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.runtime.journal_records import (
    attempt,
    commit,
    ended,
    incident,
    published,
    replay,
    restored,
    started,
    train,
)
from support.journal import as_event, as_events

from grpo_run.runtime.history.history import History
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations

STAGED = (1, "checkpoint_staged", {"step": 40, "train_call": 1})
"""A snapshot is in memory."""


def test_an_empty_journal_gives_an_empty_history() -> None:
    """No step, no goodput, no exit code."""
    history = replay()
    assert (history.step, history.attempts, history.exit_code) == (0, 0, None)
    assert history.goodput() is None
    assert not history.finished


def test_a_run_without_faults() -> None:
    """Steps, target, attempts and end are as written."""
    history = replay(started(0), attempt(1), train(2), commit(3, 1), commit(4, 2), ended(4, 0, "Finished."))
    assert (history.run_id, history.step, history.target_steps, history.attempts) == ("run-1", 2, 100, 1)
    assert history.finished
    assert history.sentence == "Finished."
    assert history.recoveries == []


def test_a_new_supervisor_resets_the_end_of_the_run() -> None:
    """No exit code and no sentence; attempts, steps and recoveries remain."""
    history = replay(
        started(0), attempt(1), train(2), commit(3, 4), incident(4, 4), ended(5, 93, "Gave up."),
        started(100), attempt(101, 1),
    )  # fmt: skip
    assert (history.exit_code, history.sentence, history.state) == (None, "", "starting")
    assert (history.supervisors, history.attempts, history.step) == (2, 2, 4)
    assert len(history.recoveries) == 1


def test_the_best_position_never_decreases() -> None:
    """Repeated steps do not lower it."""
    history = replay(started(0), train(1), commit(2, 9), attempt(3, 1), train(4, 5), commit(5, 6))
    assert history.best_position == (1, 9)
    assert history.step == 6


def test_only_rank_0_starts_a_train_call() -> None:
    """Every rank writes the event; one is counted."""
    history = replay(started(0), train(1, 5), train(9, 5, rank=1), commit(10, 6))
    assert history.productive_seconds() == 9.0


def test_unknown_events_are_ignored() -> None:
    """A later release may write them."""
    history = replay(started(0), (5, "something_new", {"x": 1}))
    assert (history.wall.last, history.unreadable) == (5, 0)


def test_warnings_and_rewards_are_kept() -> None:
    """The number of warnings, and the last reward; a step without a reward does not erase it."""
    history = replay(
        started(0), (1, "warning", {"text": "x"}), (2, "warning", {"text": "y"}),
        (3, "step_logged", {"reward": 0.5}), (4, "step_logged", {"reward": None}),
    )  # fmt: skip
    assert (history.warnings, history.reward) == (2, 0.5)


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (75, "stopped"), (93, "failed"), (2, "failed")])
def test_how_a_run_ended_is_told_by_its_exit_code(code: int, state: str) -> None:
    """Also where the supervisor failed before it could change the state. Only 0 is finished."""
    collecting = (1.0, "state_changed", {"from": "running", "to": "collecting"})
    history = replay(started(0), collecting, ended(2, code))
    assert (history.state, history.finished) == (state, code == 0)


def test_a_new_highest_checkpoint_refills_the_budget() -> None:
    """Failures before it no longer count."""
    records = [started(0), incident(1, 3), incident(2, 3)]
    assert replay(*records).failures_without_progress == 2
    assert replay(*records, published(3, 5)).failures_without_progress == 0


@pytest.mark.parametrize("again", [5, 3])
def test_saving_an_old_step_again_is_not_progress(again: int) -> None:
    """Repeated work does not refill the budget."""
    history = replay(started(0), published(1, 5), incident(2, 6), published(3, again), incident(4, 6))
    assert history.failures_without_progress == 2
    assert history.highest_checkpoint == (1, 5)


def test_a_checkpoint_of_a_later_call_is_progress() -> None:
    """Call 2 at step 1 is further than call 1 at step 20."""
    history = replay(started(0), published(1, 20, call=1), incident(2, 0), published(3, 1, call=2))
    assert history.failures_without_progress == 0
    assert history.highest_checkpoint == (2, 1)


def test_the_last_published_checkpoint_is_kept() -> None:
    """Its step and path."""
    history = replay(started(0), published(1, 5), published(2, 10))
    assert history.checkpoint is not None
    assert (history.checkpoint.step, history.checkpoint.path) == (10, "out/checkpoint-10")


def test_an_older_checkpoint_written_later_does_not_hide_the_newest() -> None:
    """A run that stops writes its newest snapshot first, then the scheduled checkpoint before it."""
    history = replay(started(0), attempt(1), train(2), published(3, 9), published(4, 8))
    assert history.checkpoint is not None
    assert history.checkpoint.step == 9


def test_an_attempt_that_began_before_the_newest_checkpoint_replaces_it() -> None:
    """Checkpoint 9 was damaged or set aside: once the attempt that began at 4 saves, its checkpoint is the
    newest.
    """
    events = [started(0), attempt(1), train(2), published(3, 9), attempt(4), train(5, step=4)]
    kept = replay(*events).checkpoint
    assert kept is not None
    assert kept.step == 9
    replaced = replay(*events, published(6, 6)).checkpoint
    assert replaced is not None
    assert replaced.step == 6
    later = replay(*events, published(6, 6), published(7, 5)).checkpoint
    assert later is not None
    assert later.step == 6


@pytest.mark.parametrize("code", [0, 75, 93])
def test_a_run_that_has_ended_has_no_snapshot_in_memory(code: int) -> None:
    """Every snapshot needed is on disk by then or cannot be read, and the memory is freed."""
    assert replay(started(0), STAGED).snapshot_step == 40
    failed = (2, "checkpoint_failed", {"step": 40, "reason": "cannot be read"})
    for last in (published(2, 40), failed):
        assert replay(started(0), STAGED, last, ended(3, code)).snapshot_step is None


def test_a_snapshot_that_a_full_disk_kept_in_memory_is_shown_until_it_is_written() -> None:
    """It outlives the run; the next launch of the same command writes it."""
    kept = [
        started(0), STAGED,
        (2, "checkpoint_failed", {"step": 40, "reason": "the disk is full"}),
        (3.0, "run_ended", {"exit_code": 0, "snapshots_kept": True}),
    ]  # fmt: skip
    assert replay(*kept).snapshot_step == 40
    assert replay(*kept, published(4, 40)).snapshot_step is None


def test_a_snapshot_survives_a_killed_supervisor() -> None:
    """It wrote no end: the memory is not freed."""
    assert replay(started(0), STAGED, started(5)).snapshot_step == 40


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


@pytest.mark.parametrize(("resumed", "lost"), [(3, 2), (0, 5)])
def test_lost_steps_are_counted_in_the_call_of_the_fault(resumed: int, lost: int) -> None:
    """A script that trains twice restores its finished first call before the second one resumes, or starts
    over.
    """
    history = replay(
        started(0), attempt(1), train(2, 0, call=1), commit(3, 20, call=1),
        train(4, 0, call=2), commit(5, 5, call=2), incident(6, 5, train_call=2),
        attempt(7, 1), restored(8, 20, call=1), train(9, resumed, call=2),
    )  # fmt: skip
    assert history.recoveries[0].lost_steps == lost


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


def test_steps_committed_between_two_polls_count_fully() -> None:
    """The supervisor polls ten times a second; fast steps are observed several at once."""
    history = replay(started(0), attempt(0), train(0), commit(5, 3), commit(10, 8), ended(10, 0))
    assert history.goodput() == 1.0


def test_the_time_left_follows_from_the_present_pace() -> None:
    """Computed by hand: 90 more steps of 2 s."""
    history = replay(started(0), attempt(0), train(0), *[commit(2 * step, step) for step in range(1, 11)])
    assert history.step_seconds() == 2.0
    assert history.remaining_seconds() == 180.0
    history.step = 120
    assert history.remaining_seconds() == 0.0
    history.target_steps = 0
    assert history.remaining_seconds() is None


def test_restoring_the_first_call_keeps_the_goodput_of_the_second() -> None:
    """Steps 1 to 3 of call 2 are in the checkpoint that the run resumes from: they are productive."""
    history = replay(
        started(0), attempt(0), train(0, 0, call=1), commit(10, 20, call=1),
        train(10, 0, call=2), commit(20, 3, call=2), incident(20, 3),
        attempt(20, 1), restored(20, 20, call=1), train(20, 3, call=2), commit(40, 10, call=2), ended(40, 0),
    )  # fmt: skip
    assert history.productive_seconds() == 40.0


def test_goodput_of_a_live_run_counts_until_now() -> None:
    """It decreases while a run hangs and writes no events."""
    history = replay(started(0), attempt(0), train(0), commit(10, 1))
    assert history.goodput(now=40) == 0.25
    assert history.goodput() == 1.0


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("train_started", {}),
        ("train_started", {"rank": 0, "step": "x", "train_call": 1, "target_steps": 100}),
        ("step_committed", {"step": None, "train_call": 1, "committed_at": 2.0}),
        ("step_committed", {"truncated_bytes": 70_000}),
        ("checkpoint_published", {"step": 5}),
    ],
)
def test_an_invalid_record_is_counted_and_ignored(event: str, fields: dict[str, Any]) -> None:
    """It was truncated, or another version wrote it; the records around it count."""
    around = [started(0), attempt(1), train(2), commit(3, 1)]
    history = replay(*around, (4, event, fields), commit(5, 2))
    assert history.unreadable == 1
    assert history.best_position == replay(*around, commit(5, 2)).best_position == (1, 2)


@pytest.mark.parametrize("time", ["noon", [1], {"a": 1}])
def test_a_record_with_an_invalid_time_is_counted_and_ignored(time: Any) -> None:
    """The clock of the history does not change."""
    history = History.of(
        as_events([{"time": 1.0, "event": "warning"}, {"time": time, "event": "run_started", "run": "x"}])
    )
    assert (history.unreadable, history.wall.last, history.run_id) == (1, 1.0, History().run_id)


def phase_learned(time: float, phase: str, durations: Any) -> tuple[float, str, dict[str, Any]]:
    """The durations of a phase, as the supervisor writes them."""
    return time, "phase_learned", {"phase": phase, "durations": durations}


def test_the_last_durations_of_a_phase_count() -> None:
    """Each record contains the earlier ones, over attempts and supervisors, so they are not added up."""
    early, late = Durations.of([9.0, 1.0]), Durations.of([9.0, 1.0, 2.0])
    history = replay(
        started(0.0), phase_learned(1.0, "reward", early.as_json()), attempt(2.0, 1), started(3.0),
        phase_learned(4.0, "reward", late.as_json()), phase_learned(5.0, "generate", early.as_json()),
    )  # fmt: skip
    assert history.phases == {Phase.reward: late, Phase.generate: early}


def test_callbacks_are_learned_by_name_and_an_end_survives_a_restart() -> None:
    """A callback may be named like a phase."""
    ended = Durations().ended_after(60.0)
    event = 1.0, "phase_learned", {"phase": "callback", "callback": "reward", "durations": ended.as_json()}
    history = replay(event, phase_learned(2.0, "reward", Durations.of([1.0]).as_json()))
    assert history.phases == {"reward": ended, Phase.reward: Durations.of([1.0])}


@pytest.mark.parametrize(
    ("phase", "durations"),
    [
        ("no_such_phase", Durations.of([1.0]).as_json()),
        ("reward", None),
        ("reward", {"counts": {"99": 1}, "first_seconds": 1.0, "max_seconds": 1.0}),
        ("reward", {"counts": {"1": -1}, "first_seconds": 1.0, "max_seconds": 0.0}),
        ("reward", [1, 2]),
    ],
)
def test_invalid_phase_durations_are_ignored(phase: str, durations: Any) -> None:
    """Another version may have written them; the others are kept."""
    good = Durations.of([1.0, 2.0])
    history = replay(phase_learned(1.0, phase, durations), phase_learned(2.0, "data", good.as_json()))
    assert (history.phases, history.unreadable) == ({Phase.data: good}, 1)


STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 30), st.integers(1, 2)),
        st.tuples(st.just("train"), st.integers(0, 30), st.integers(1, 2)),
        st.tuples(st.just("incident"), st.integers(0, 30), st.just(1)),
        st.tuples(st.just("published"), st.integers(0, 30), st.integers(1, 2)),
        st.tuples(st.just("attempt"), st.integers(0, 5), st.just(1)),
        st.tuples(st.just("started"), st.just(0), st.just(1)),
        st.tuples(st.just("ended"), st.sampled_from([0, 75, 93]), st.just(1)),
    ),
    max_size=40,
)


def records_of(
    story: list[tuple[str, int, int]], times: list[float]
) -> list[tuple[float, str, dict[str, Any]]]:
    """Return the records of a story."""
    makers = {
        "commit": commit,
        "train": train,
        "published": published,
        "incident": lambda time, step, call: incident(time, step),
        "attempt": lambda time, number, call: attempt(time, number),
        "started": lambda time, zero, call: started(time),
        "ended": lambda time, code, call: ended(time, code),
    }
    return [makers[kind](time, number, call) for time, (kind, number, call) in zip(times, story, strict=True)]


@given(story=STORIES, data=st.data())
def test_ratios_and_counts_stay_in_range(story: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """For any sequence of events, and a wall clock that may go backwards."""
    times = data.draw(st.lists(st.floats(0, 1e6), min_size=len(story), max_size=len(story)))
    history = replay(*records_of(story, times))
    goodput = history.goodput()
    assert goodput is None or 0.0 <= goodput <= 1.0
    for recovery in history.recoveries:
        assert recovery.lost_steps is None or recovery.lost_steps >= 0
        assert recovery.recovery_seconds is None or recovery.recovery_seconds >= 0.0
    assert history.failures_without_progress <= len(history.recoveries)


@given(story=STORIES, data=st.data())
def test_highest_checkpoint_and_best_position_never_decrease(
    story: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """After each record. Applying records one by one equals replaying all."""
    times = sorted(data.draw(st.lists(st.floats(0, 1e6), min_size=len(story), max_size=len(story))))
    history = History()
    before = (history.highest_checkpoint, history.best_position)
    for time, event, fields in records_of(story, times):
        history.apply(as_event({"time": time, "event": event, **fields}))
        after = (history.highest_checkpoint, history.best_position)
        assert after[0] >= before[0]
        assert after[1] >= before[1]
        before = after
    assert history == replay(*records_of(story, times))
