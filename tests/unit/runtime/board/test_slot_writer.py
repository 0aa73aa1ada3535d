"""What a rank writes into its slot: its phases, its heartbeat, and what it counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.boards import seen

from grpo_run.runtime.board._slot_layout import MAX_OPEN_PHASES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter, phases_of
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(allow_nan=False)


FIELDS = {
    "train_call": INT32, "step": INT32, "target_steps": INT32, "voted_step": INT32, "committed_step": INT32,
    "resumed_step": INT32, "checkpoint_step": INT32, "tokens_generated": UINT64, "rewards_scored": UINT64,
    "votes": UINT64, "cleanup_runs": UINT64, "vote_wait_seconds": FLOAT, "cleanup_seconds": FLOAT,
    "checkpoint_seconds": FLOAT, "ended_eos": FLOAT, "ended_deadline": FLOAT,
    "prompt_tokens": FLOAT, "prompt_length": FLOAT,
    "state": st.sampled_from(RankState),
}  # fmt: skip
"""Every attribute of a writer that a reader sees under the same name."""


@given(values=st.fixed_dictionaries(FIELDS))
def test_every_field_is_read_as_it_was_written(
    make_folder: Callable[[], Path], values: dict[str, object]
) -> None:
    """The test covers the full range of each field."""
    board = Board.create(make_folder() / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=1, attempt=0)
    for name, value in values.items():
        setattr(writer, name, value)
    writer.publish()
    slot = seen(board, 0)
    assert {name: getattr(slot, name) for name in values} == values


def test_times_are_monotonic_seconds(board: Board, writer: SlotWriter) -> None:
    """Written in nanoseconds, read in seconds."""
    writer.voted_at_ns = 1_500_000_000
    writer.train_started_ns = 250_000_000
    before = time.monotonic()
    writer.publish()
    slot = seen(board)
    assert (slot.voted_at_seconds, slot.train_started_ns) == (1.5, 250_000_000)
    assert before - 1e-3 <= slot.last_progress_seconds <= time.monotonic()


@given(values=st.dictionaries(st.sampled_from(LOGGED_FIELDS), FLOAT))
def test_what_was_logged_is_read_and_the_rest_is_nan(
    make_folder: Callable[[], Path], values: dict[str, float]
) -> None:
    """Zero would be a value. What is logged later does not change other fields."""
    board = Board.create(make_folder() / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=1, attempt=0)
    for field, value in values.items():
        writer.log({field: value})
    slot = seen(board, 0)
    found = {field: slot.value(field) for field in LOGGED_FIELDS}
    assert {field: value for field, value in found.items() if not math.isnan(value)} == values


@pytest.mark.parametrize(
    ("calls", "remain"),
    [
        ("enter data, enter score, enter reward, leave reward", "data score"),
        ("enter data, enter score, enter reward, leave data", ""),  # as by an exception
        ("enter reward, enter reward, leave reward", "reward"),  # a reward function may call another
        ("enter data, leave vote", "data"),  # `replace` may have closed it already
        ("enter data, enter generate, replace optimizer", "optimizer"),
    ],
)
def test_phases_nest(board: Board, writer: SlotWriter, calls: str, remain: str) -> None:
    """Outermost first, each with its start. Leaving a phase closes those inside it, and no other one."""
    for call in calls.split(", "):
        method, phase = call.split()
        getattr(writer, method)(Phase[phase])
    phases = seen(board).phases
    assert [entry.phase.name for entry in phases] == remain.split()
    assert [entry.since_seconds for entry in phases] == sorted(entry.since_seconds for entry in phases)


def fail_in(writer: SlotWriter, *phases: Phase) -> ValueError:
    """Raise in nested phases; return the exception after it has left all of them."""
    error = ValueError("broken")

    def inside(remaining: tuple[Phase, ...]) -> None:
        if not remaining:
            raise error
        try:
            writer.enter(remaining[0])
            inside(remaining[1:])
        finally:
            writer.leave(remaining[0])

    with pytest.raises(ValueError, match="broken"):
        inside(phases)
    return error


def test_an_exception_keeps_the_phases_that_it_was_raised_in(writer: SlotWriter) -> None:
    """The innermost one is left first. Without an open callback, none is named."""
    error = fail_in(writer, Phase.data, Phase.score, Phase.reward)
    assert phases_of(error) == ((Phase.data, Phase.score, Phase.reward), "")
    assert phases_of(ValueError("outside")) is None


def _call(function: Callable[[], None]) -> None:
    function()


def test_a_phase_that_is_left_while_an_exception_is_handled_is_not_its(writer: SlotWriter) -> None:
    """The script may evaluate in an `except` block and raise again."""
    error = ValueError("broken")
    try:
        raise error
    except ValueError:
        writer.enter(Phase.eval)
        leave = partial(writer.leave, Phase.eval)
        _call(leave)
    assert phases_of(error) is None


def test_an_exception_of_a_callback_names_it(writer: SlotWriter) -> None:
    """Class and event."""
    error = ValueError("broken")

    def on_save() -> None:
        try:
            writer.enter_callback("Mine.on_save")
            raise error
        finally:
            writer.leave(Phase.callback)

    with pytest.raises(ValueError, match="broken"):
        on_save()
    assert phases_of(error) == ((Phase.callback,), "Mine.on_save")


def test_only_the_innermost_phases_are_published(board: Board, writer: SlotWriter) -> None:
    """The writer remembers the others: leaving makes them visible again."""
    phases = [Phase(1 + index % len(Phase)) for index in range(MAX_OPEN_PHASES + 3)]
    for phase in phases:
        writer.enter(phase)
    assert [entry.phase for entry in seen(board).phases] == phases[-MAX_OPEN_PHASES:]
    for phase in reversed(phases[3:]):
        writer.leave(phase)
    assert [entry.phase for entry in seen(board).phases] == phases[:3]


def test_state_is_published_with_a_phase(board: Board, writer: SlotWriter) -> None:
    """A change of state does not wait for the next `publish`."""
    writer.state = RankState.training
    writer.enter(Phase.data)
    assert seen(board).state is RankState.training


def test_heartbeat_and_work_are_no_writes(board: Board, writer: SlotWriter) -> None:
    """Any thread may stamp them, so they do not use the seqlock."""
    before = seen(board)
    assert (before.heartbeat_seconds > 0, before.last_work_seconds) == (True, 0.0)
    writer.record_work()
    after = seen(board)
    assert after.last_work_seconds >= before.heartbeat_seconds
    assert (after.writes, after.heartbeat_seconds) == (before.writes, before.heartbeat_seconds)
    writer.heartbeat()
    assert seen(board).heartbeat_seconds >= after.last_work_seconds
    assert seen(board).last_work_seconds == after.last_work_seconds


@pytest.mark.parametrize("name", ["tokens_generated", "rewards_scored"])
def test_measured_work_is_progress_and_publishing_is_not(board: Board, writer: SlotWriter, name: str) -> None:
    """A rank that only publishes its slot again has done no work."""
    writer.publish()
    assert seen(board).last_work_seconds == 0.0
    setattr(writer, name, 5)
    writer.publish()
    counted = seen(board).last_work_seconds
    assert counted > 0.0
    writer.publish()
    assert seen(board).last_work_seconds == counted


def test_every_way_to_end_a_phase_is_counted_once(board: Board, writer: SlotWriter) -> None:
    """Left, closed with an enclosing phase, or replaced; open phases are not counted."""
    for _ in range(3):
        writer.replace(Phase.data)
        writer.enter(Phase.score)
        writer.enter(Phase.reward)
        writer.leave(Phase.reward)
        writer.enter(Phase.generate)
        writer.leave(Phase.score)  # and generate with it
    durations = board.durations(1)
    assert {phase: one.count + 1 for phase, one in durations.items()} == {
        Phase.data: 2, Phase.score: 3, Phase.reward: 3, Phase.generate: 3,
    }  # fmt: skip
    assert board.durations(0) == {}


def test_on_change_is_called_while_the_phase_before_still_runs(board: Board, writer: SlotWriter) -> None:
    """With the innermost phase that runs and the one that runs then, also if that had begun before."""
    told: list[tuple[Phase | None, Phase | None, Phase | None]] = []

    def change(ended: Phase | None, begun: Phase | None) -> None:
        told.append((ended, begun, seen(board).phase))

    writer.on_change = change
    writer.replace(Phase.data)
    writer.enter(Phase.score)
    writer.enter_callback("Upload.on_log")
    writer.enter(Phase.generate)
    writer.leave(Phase.callback)
    writer.leave(Phase.reward)
    writer.leave(Phase.score)
    writer.leave(Phase.data)
    assert told == [
        (None, Phase.data, None),
        (Phase.data, Phase.score, Phase.data),
        (Phase.score, Phase.callback, Phase.score),
        (Phase.callback, Phase.generate, Phase.callback),
        (Phase.generate, Phase.score, Phase.generate),
        (Phase.score, Phase.data, Phase.score),
        (Phase.data, None, Phase.data),
    ]


def test_on_enter_is_called_after_the_phase_is_on_the_board(board: Board, writer: SlotWriter) -> None:
    """`enter` and `replace` call it; `leave` does not."""
    told: list[tuple[Phase, Phase | None]] = []
    writer.on_enter = lambda phase: told.append((phase, seen(board).phase))
    writer.replace(Phase.data)
    writer.enter(Phase.generate)
    writer.leave(Phase.generate)
    assert told == [(Phase.data, Phase.data), (Phase.generate, Phase.generate)]


def test_on_enter_that_raises_leaves_the_phase_open(board: Board, writer: SlotWriter) -> None:
    """An injected fault happens in the requested phase; the slot stays readable."""

    def fault(phase: Phase) -> None:
        raise RuntimeError("planted")

    writer.on_enter = fault
    with pytest.raises(RuntimeError, match="planted"):
        writer.enter(Phase.reward)
    assert seen(board).phase is Phase.reward
