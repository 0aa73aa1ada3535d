"""AsyncGRPO's process gets the prompts that a checkpoint does not have as done; the ledger says the rest."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.features.ledger._async import STATE
from grpo_run.runtime.features.ledger._join import join
from grpo_run.runtime.features.ledger._lines import ledger_file, read_lines
from grpo_run.runtime.features.ledger._replay import Replay
from grpo_run.runtime.features.ledger.rank import LedgerPart
from grpo_run.runtime.features.ledger.report import sentences, summary
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.upstream import async_grpo_names as names

PROMPTS = 4
GENERATIONS = 2


class Tokens(list[int]):
    """A row of numbers as numpy has it."""

    def sum(self) -> int:
        """Return how many are 1."""
        return sum(list(self))


def sample(group: int, length: int, version: int = 9, tokens: int = 0) -> Any:
    """One row of a group."""
    return SimpleNamespace(
        group_id=group, completion_mask=Tokens([1] * length), input_ids=[0] * (tokens or length),
        prompt=f"prompt {group}", model_version=version,
    )  # fmt: skip


class Attempt:
    """One attempt of a call, whose trainer takes micro-batches of two rows."""

    def __init__(self, run: Path, number: int = 0, step: int = 0, worker: Any = None) -> None:
        self.warned: list[str] = []
        self.started: list[Any] = []
        session: Any = SimpleNamespace(
            rank=0, world_size=1, is_main=True, config=SimpleNamespace(run_directory=run),
            settings=SimpleNamespace(attempt=number), warn=self.warned.append, warn_in_journal=pytest.fail,
        )  # fmt: skip
        self.worker = worker or SimpleNamespace(
            rollout_buffer=SimpleNamespace(get=queue.Queue().get),
            _loop_cls=SimpleNamespace(_repeat_iterator=SimpleNamespace(__module__="trl.here")),
            _loop_kwargs={"dataset": [{"prompt": at} for at in range(PROMPTS)], "dataset_start_index": 0},
        )
        self.rows: list[Any] = []
        self.worker.rollout_buffer.get = lambda **_: self.rows.pop(0)
        self.worker.start = lambda: self.started.append(dict(getattr(self.worker, names.LOOP, {})))
        self.trainer: Any = SimpleNamespace(
            rollout_worker=self.worker, _trained_groups=set(), _groups_before_resume=0, model_version=9,
            state=SimpleNamespace(global_step=step), training_step=lambda: None,
            args=SimpleNamespace(num_generations=GENERATIONS, max_staleness=4, token_budget=100),
        )  # fmt: skip
        self.hooks = ExitStack()
        self.points = CallPoints(train_call=1, trainer=self.trainer, hooks=self.hooks)
        LedgerPart().call(session, self.points)

    def begin(self, state: Any = None) -> Attempt:
        """Start the process, as TRL does before the state is loaded."""
        self.worker.start()
        if state is not None:
            assert not self.started
            self.points.load(state)
        return self

    def step(self, rows: Iterable[Any]) -> Any:
        """Take rows, train them, and return what a checkpoint holds then."""
        self.rows += rows
        taken = []
        while self.rows:
            row = self.worker.rollout_buffer.get(timeout=5.0)
            taken += [row] * (not names.dropped(self.trainer, row))
        self.trainer._trained_groups.update(row.group_id for row in taken)
        self.trainer.training_step()
        self.trainer.state.global_step += 1
        for ends in self.points.step_ends:
            ends(self.trainer.state.global_step)
        return json.loads(json.dumps(self.points.state()))

    def drawn(self, count: int) -> list[Any]:
        """Return what the process draws first."""
        return [row["prompt"] for row, _ in zip(self.started[0]["dataset"], range(count), strict=False)]


def test_prompts_in_flight_are_drawn_again_and_others_are_not(tmp_path: Path) -> None:
    """One was trained out of order, and one in part."""
    first = Attempt(tmp_path).begin()
    assert first.drawn(9) == list(range(PROMPTS))
    first.step([sample(1, 3), sample(1, 4)])
    state = first.step([sample(2, 5)])
    first.step([sample(2, 90), sample(0, 6), sample(0, 7)])  # no checkpoint has it
    second = Attempt(tmp_path, 1, step=2).begin(state)
    assert second.drawn(5) == [0, 2, 3, 0, 1]
    assert second.trainer._groups_before_resume == 1
    second.step([sample(1, 8), sample(1, 9), sample(0, 10), sample(0, 11), sample(2, 12), sample(2, 13)])
    lines = join([Replay.of(read_lines(ledger_file(tmp_path, 0)), 0)], {1: 3})
    assert [(one.position, one.state.value, one.lengths, one.repeated) for one in lines] == [
        (0, "trained_again", [10, 11], [6, 7]),
        (1, "trained", [3, 4], []),
        (2, "trained_again", [5, 9], [8, 90]),
        (3, "trained", [12, 13], []),
    ]
    assert [one.attempt for one in lines] == [1, 0, 1, 1]
    second.hooks.close()
    assert second.worker._loop_kwargs["dataset"] == first.started[0]["dataset"]


def test_what_is_dropped_is_said_and_not_drawn_again(tmp_path: Path) -> None:
    """As too old, or too long for the trainer."""
    attempt = Attempt(tmp_path).begin()
    stale, long = [sample(0, 3, version=1)] * 2, [sample(1, 4, tokens=101)] * 2
    state = attempt.step([*stale, *long, sample(2, 5), sample(2, 6), sample(3, 7)])
    assert state[STATE] == {"first": 3, "done": [], "partial": [[3, 1]], "trained": 1}
    lines = join([Replay.of(read_lines(ledger_file(tmp_path, 0)), 0)], {1: 1})
    assert [one.state.value for one in lines] == ["stale", "masked", "trained", "trained"]
    sums = summary(lines)
    assert sums["masked"] == {names.TOO_LONG: 2}
    assert sums["lengths"]["trained"]["max"] == 7
    said = sentences(sums)
    assert "1 discarded as stale, 0 lost." in said[0]
    assert "2 completions discarded as stale." in said


def test_steps_that_are_not_committed_do_not_count(tmp_path: Path) -> None:
    """The next pass has numbers of its own."""
    attempt = Attempt(tmp_path).begin()
    for step in range(3):
        attempt.step(sample(2 * step + row // 2, 1) for row in range(4))
    lines = join([Replay.of(read_lines(ledger_file(tmp_path, 0)), 0)], {1: 2})
    assert [(one.epoch, one.position, one.state.value) for one in lines] == [
        (0, 0, "trained"), (0, 1, "trained"), (0, 2, "trained"), (0, 3, "trained"), (1, 0, "open"),
        (1, 1, "open"),
    ]  # fmt: skip


def test_prompts_that_a_stream_leaves_out_without_a_step_are_lost_and_others_twice(tmp_path: Path) -> None:
    """If a checkpoint and what counts disagree, the ledger says so."""
    first = Attempt(tmp_path).begin()
    first.step([sample(0, 1), sample(0, 1), sample(1, 1), sample(1, 1)])
    state = {STATE: {"first": 1, "done": [2], "partial": [], "trained": 2}}
    second = Attempt(tmp_path, 1, step=1).begin(state)
    second.step([sample(0, 1), sample(0, 1), sample(1, 1), sample(1, 1)])
    lines = join([Replay.of(read_lines(ledger_file(tmp_path, 0)), 0)], {1: 2})
    assert [one.state.value for one in lines] == ["trained", "twice", "lost", "trained"]


def test_a_checkpoint_without_the_order_goes_on_as_trl_does(tmp_path: Path) -> None:
    """One line says so, and the process starts at the first wait for a row at the latest."""
    attempt = Attempt(tmp_path, step=5)
    attempt.worker._loop_kwargs["dataset_start_index"] = 2
    attempt.begin()
    assert not attempt.started
    attempt.step([sample(0, 1), sample(0, 1)])
    assert attempt.started[0]["dataset_start_index"] == 2
    (said,) = attempt.warned
    assert said.endswith("it goes on with prompt 2, as TRL does")
    (line,) = join([Replay.of(read_lines(ledger_file(tmp_path, 0)), 0)], {1: 6})
    assert (line.position, line.state.value) == (2, "trained")


def test_another_worker_keeps_its_order(tmp_path: Path) -> None:
    """Nothing is written of it, and one line says so."""
    worker = SimpleNamespace(rollout_buffer=SimpleNamespace())
    attempt = Attempt(tmp_path, worker=worker)
    worker.start()
    assert attempt.warned == [names.UNKNOWN_ORDER]
    assert not attempt.points.states
    assert not (tmp_path / "ledger").exists()


def test_a_trainer_that_collates_otherwise_trains_without_a_ledger(tmp_path: Path) -> None:
    """A checkpoint then holds nothing, so that a resume is TRL's."""
    attempt = Attempt(tmp_path).begin()
    attempt.trainer._trained_groups = set()
    assert attempt.step([sample(0, 1), sample(0, 1)]) == {}
    assert attempt.step([sample(1, 1), sample(1, 1)]) == {}
    (said,) = attempt.warned
    assert "the ledger ends here" in said


def test_nothing_is_warned_of_an_order_that_goes_on(tmp_path: Path) -> None:
    """Elsewhere, a line says that data is used again after a recovery."""
    assert Attempt(tmp_path / "own").points.keeps_order
    other = SimpleNamespace(rollout_buffer=SimpleNamespace())
    assert not Attempt(tmp_path / "other", worker=other).points.keeps_order
