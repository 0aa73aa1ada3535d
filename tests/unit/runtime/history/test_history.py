"""What a journal says about its run; see the text files. And what holds for every journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.runtime.history_shell import HistoryShell
from support.builders.runtime.journal_records import (
    attempt,
    commit,
    ended,
    incident,
    published,
    replay,
    started,
    train,
)
from support.journal import as_event, as_events
from support.transcripts import Story, stories

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.train_calls import MAX_PASSED_CALLS
from grpo_run.runtime.history.wall_states import WallState
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations


@stories(__file__, "history.txt", "sentences.txt", "train_calls.txt")
def test_history(story: Story, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of these files, at 1180 s."""
    monkeypatch.setattr("time.time", lambda: 1180.0)
    story.check(HistoryShell(), word)


def test_the_calls_fit_into_an_environment_variable() -> None:
    """A long loop passes its newest ones."""
    passed = replay(attempt(0), *(train(1, call=number) for number in range(1, 200))).calls.to_pass()
    assert [passed[0].ordinal, passed[-1].ordinal] == [200 - MAX_PASSED_CALLS, 199]


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
        st.tuples(st.sampled_from(["published", "staged"]), st.integers(0, 30), st.integers(1, 2)),
        st.tuples(st.just("attempt"), st.integers(0, 5), st.just(1)),
        st.tuples(st.just("started"), st.just(0), st.just(1)),
        st.tuples(st.just("ended"), st.sampled_from([0, 75, 93]), st.just(1)),
    ),
    max_size=40,
)


def records_of(
    story: list[tuple[str, int, int]], times: Sequence[float]
) -> list[tuple[float, str, dict[str, Any]]]:
    """Return the records of a story."""
    makers = {
        "commit": commit,
        "train": train,
        "published": published,
        "staged": lambda time, step, call: (time, "checkpoint_staged", {"step": step, "seconds": 2.0}),
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


@given(story=STORIES, data=st.data())
def test_any_history_loses_no_second(story: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """After the end all states together are the time since the first event, and goodput is their share."""
    times = sorted(data.draw(st.lists(st.integers(0, 400), min_size=len(story), max_size=len(story))))
    records = [started(0), *records_of(story, times)]
    before = dict.fromkeys(WallState, 0.0)
    for count in range(1, len(records) + 1):
        after = replay(*records[:count]).wall.seconds
        assert all(after[state] >= before[state] for state in WallState)
        before = dict(after)
    now = max(times, default=0)
    history = replay(*records, ended(now, 0))
    assert sum(history.wall.seconds.values()) == pytest.approx(now)
    running = now - history.wall.seconds[WallState.stopped]
    goodput = history.goodput()
    if running:
        assert goodput == pytest.approx(history.wall.seconds[WallState.productive] / running)
