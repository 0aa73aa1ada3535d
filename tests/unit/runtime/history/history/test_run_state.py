"""What a run is: started, training, ended, and by which exit code."""

from __future__ import annotations

import pytest
from support.builders.runtime.journal_records import attempt, commit, ended, incident, replay, started, train


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


@pytest.mark.parametrize(("code", "finished"), [(0, True), (75, False), (93, False), (2, False)])
def test_only_exit_code_0_is_finished(code: int, finished: bool) -> None:
    """Every other run can be resumed."""
    assert replay(started(0), ended(1, code)).finished is finished


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
    assert history.time.last == 5


def test_warnings_and_rewards_are_kept() -> None:
    """The number of warnings, and the last reward; a step without a reward does not erase it."""
    history = replay(
        started(0), (1, "warning", {"text": "x"}), (2, "warning", {"text": "y"}),
        (3, "step_logged", {"reward": 0.5}), (4, "step_logged", {"reward": None}),
    )  # fmt: skip
    assert (history.warnings, history.reward) == (2, 0.5)


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (75, "stopped"), (93, "failed"), (2, "failed")])
def test_how_a_run_ended_is_told_by_its_exit_code(code: int, state: str) -> None:
    """Also where the supervisor failed before it could change the state."""
    collecting = (1.0, "state_changed", {"from": "running", "to": "collecting"})
    assert replay(started(0), collecting, ended(2, code)).state == state
