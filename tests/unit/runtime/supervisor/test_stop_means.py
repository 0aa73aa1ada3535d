"""How a stop is made, and with which code it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.journal import as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.runtime.supervisor.stop_means import StopMeans, choose, describe, returned_code, stop_code
from grpo_run.watchdog.observation import Exit, RankError, RankState, Slot

MakeSlot = Callable[..., Slot]
OWN = {"event": "trains_without_trainer", "time": 1000.0}
BEGUN = {"event": "run_started", "time": 1000.0, "run": "r"}
CALL = {
    "event": "train_started", "time": 1000.0, "train_call": 1, "rank": 0, "step": 0, "trainer_class": "T",
    "output_dir": "/o",
}  # fmt: skip
STARTING: dict[str, Any] = {"state": RankState.starting, "train_call": 0, "step": 0, "phases": ()}
ALONE = STARTING | {"no_trainer_after": 1}
RETURNED: dict[str, Any] = {"state": RankState.returned}
BETWEEN: dict[str, Any] = {"state": RankState.between, "train_call": 1}


@pytest.mark.parametrize(
    ("first", "second", "records", "committed", "means"),
    [
        (STARTING, STARTING, [], (0, 0), StopMeans.term),
        (STARTING, ALONE, [OWN], (0, 0), StopMeans.term),
        ({"step": 0}, {"step": 0}, [CALL], (0, 0), StopMeans.end),
        ({"step": 0, "no_trainer_after": 1}, {"step": 0}, [OWN, CALL], (0, 0), StopMeans.end),
        ({}, {}, [CALL], (1, 7), StopMeans.vote),
        ({}, STARTING, [CALL], (0, 0), StopMeans.vote),
        (BETWEEN, BETWEEN, [CALL], (1, 7), StopMeans.vote),
        (BETWEEN | {"no_trainer_after": 1}, BETWEEN, [OWN, CALL], (1, 7), StopMeans.vote),
        (BETWEEN | {"no_trainer_after": 2}, BETWEEN, [CALL, OWN], (1, 7), StopMeans.term),
        (RETURNED, RETURNED, [CALL], (1, 7), StopMeans.exit),
        (RETURNED, {"state": RankState.done}, [], (0, 0), StopMeans.exit),
        (RETURNED, BETWEEN, [CALL], (1, 7), StopMeans.vote),
    ],
)
def test_the_means_follow_from_what_the_ranks_do(
    first: dict[str, Any], second: dict[str, Any], records: list[dict[str, Any]], committed: tuple[int, int],
    means: StopMeans, make_slot: MakeSlot,
) -> None:  # fmt: skip
    """Only inside a `train()` call, or between two, can ranks agree on a step."""
    slots: dict[int, Slot | None] = {0: make_slot(0, **first), 1: make_slot(1, **second)}
    assert choose(committed, slots, History.of(as_events(records))) is means


def test_ranks_that_are_not_on_the_board_yet_get_sigterm() -> None:
    """Nothing of them is known."""
    assert choose((0, 0), {0: None, 1: None}, History()) is StopMeans.term


@pytest.mark.parametrize(
    ("records", "code"), [([], 75), ([OWN], 93), ([OWN, CALL], 75), ([CALL, OWN], 75), ([BEGUN], 75)]
)
def test_a_stop_asks_for_a_requeue_only_with_something_to_resume_from(
    records: list[dict[str, Any]], code: int
) -> None:
    """Or if the script may have a Trainer that has not begun."""
    assert stop_code(History.of(as_events(records))) == code


def exit_of(rank: int, code: int | None, error: str | None = None, signal: int | None = None) -> Exit:
    """An exit, with an exception of this type."""
    raised = None
    if error is not None:
        raised = RankError(type=error, message="", traceback="", location=None, wall_time=0.0)
    return Exit(rank=rank, pid=1, exit_code=code, signal=signal, order=rank, error=raised)


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ([exit_of(0, 0), exit_of(1, 0)], 0),
        ([exit_of(0, 3, "SystemExit"), exit_of(1, 3, "SystemExit")], 3),
        ([exit_of(0, 0), exit_of(1, 3)], None),
        ([exit_of(0, None, signal=15), exit_of(1, None, signal=15)], None),
        ([exit_of(0, 1, "RuntimeError"), exit_of(1, 1)], None),
    ],
)
def test_the_script_s_code_is_one_that_all_ranks_have_chosen(exits: list[Exit], code: int | None) -> None:
    """A signal and an exception are not chosen."""
    assert returned_code(exits) == code


def test_what_is_said_names_the_bound() -> None:
    """It is that of the script's handlers."""
    timeouts = Timeouts(stop_seconds=120.0, handler_seconds=20.0)
    assert "handler has 20 s" in describe(
        StopMeans.term, History.of(as_events([OWN])), timeouts, training=False
    )
    assert "no step has finished" in describe(StopMeans.term, History(), timeouts, training=False)


def test_a_stop_between_two_train_calls_announces_no_step() -> None:
    """The script may evaluate or export for long, and may never train again."""
    timeouts = Timeouts(stop_seconds=120.0)
    assert "next step" in describe(StopMeans.vote, History.of(as_events([CALL])), timeouts, training=True)
    between = describe(StopMeans.vote, History.of(as_events([CALL])), timeouts, training=False)
    assert between.startswith("no train() call is running")
    assert "after 2 min" in between
