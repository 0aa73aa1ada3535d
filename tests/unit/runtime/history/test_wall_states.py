"""Every second of a run is in exactly one state, and no state's seconds ever decrease."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.runtime.journal_records import attempt, commit, ended, incident, replay, started, train

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.wall_states import WallState


def spent(history: History) -> dict[str, float]:
    """The states that have seconds."""
    return {state.value: seconds for state, seconds in history.wall.seconds.items() if seconds}


def test_a_night_with_a_fault_and_a_stop() -> None:
    """Computed by hand: the fault is at 21 s, its verdict at 24 s; step 3 is lost, and saved for 1 s."""
    history = replay(
        started(0), attempt(1), train(4), commit(8, 1), commit(12, 2),
        (15, "checkpoint_staged", {"step": 2, "train_call": 1, "seconds": 1.0}), commit(17, 3),
        (24, "incident", {"cause": "signal", "culprit": 0, "step": 3, "failed_at": 21.0}),
        (24, "action", {"action": "restart"}), attempt(26, 1), train(30, 2), commit(34, 3), commit(38, 4),
        ended(40, 75), started(100), attempt(101, 2), train(103, 4), commit(107, 5), ended(107, 0),
    )  # fmt: skip
    assert spent(history) == {
        "startup": 4 + 2 + 3,
        "productive": 4 + 4 + 4 + 4 + 4,
        "checkpoint": 1,
        "redone": 4 + 4,
        "detection": 3,
        "recovery": 6,
        "stopped": 60,
    }
    assert sum(spent(history).values()) == 107
    assert history.goodput() == pytest.approx(20 / 47)


def test_a_killed_supervisor_was_absent_since_its_last_event() -> None:
    """The step that its death has interrupted is done again."""
    history = replay(
        started(0), attempt(0), train(0), commit(10, 1), (13, "warning", {"text": ""}),
        started(1000), attempt(1000, 1), train(1000, 1), commit(1010, 2), ended(1010, 0),
    )  # fmt: skip
    assert spent(history) == {"productive": 20, "redone": 3, "stopped": 987}


def test_a_save_that_ranks_do_not_wait_for_is_no_state() -> None:
    """The supervisor publishes a snapshot while training goes on; a rank's own save is waited for."""
    published = {"step": 1, "train_call": 1, "path": "out/checkpoint-1", "verified": True, "seconds": 3.0}
    drained = (9, "checkpoint_published", published)
    history = replay(started(0), attempt(0), train(0), commit(8, 1), drained, commit(16, 2))
    assert spent(history) == {"productive": 16}
    saved = (9, "checkpoint_published", published | {"rank": 0})
    history = replay(started(0), attempt(0), train(0), commit(8, 1), saved, commit(16, 2))
    assert spent(history) == {"productive": 13, "checkpoint": 3}


EVENTS = st.sampled_from(["run_started", "attempt", "train", "commit", "staged", "incident", "run_ended"])


@given(steps=st.lists(st.tuples(EVENTS, st.integers(0, 9), st.integers(1, 5)), max_size=40))
def test_any_history_loses_no_second(steps: list[tuple[str, int, int]]) -> None:
    """After the end all states together are the time since the first event, and goodput is their share."""
    builders: dict[str, Any] = {
        "run_started": lambda at, step: started(at),
        "attempt": lambda at, step: attempt(at, 1),
        "train": train,
        "commit": commit,
        "staged": lambda at, step: (at, "checkpoint_staged", {"step": step, "train_call": 1, "seconds": 2.0}),
        "incident": incident,
        "run_ended": lambda at, step: ended(at, 75),
    }
    records, now = [started(0)], 0
    for event, seconds, step in steps:
        now += seconds
        records.append(builders[event](now, step))
    before = dict.fromkeys(WallState, 0.0)
    for count in range(1, len(records) + 1):
        after = replay(*records[:count]).wall.seconds
        assert all(after[state] >= before[state] for state in WallState)
        before = dict(after)
    history = replay(*records, ended(now, 0))
    assert sum(history.wall.seconds.values()) == pytest.approx(now)
    running = now - history.wall.seconds[WallState.stopped]
    goodput = history.goodput()
    if running:
        assert goodput == pytest.approx(history.wall.seconds[WallState.productive] / running)
