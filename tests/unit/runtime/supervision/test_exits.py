"""Which ranks have ended, and which of them before their work was done."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_STOPPED
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision import exits as exits_module
from grpo_run.runtime.supervision.exits import Exits
from grpo_run.watchdog.observation import Exit, RankState, Slot


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    """Of an attempt in which nobody has written an error."""
    files = AttemptFiles(RunDirectory(path=tmp_path / "run"), 0)
    files.make()
    return files


@pytest.fixture
def warnings() -> list[tuple[int, str]]:
    """What was warned of."""
    return []


@pytest.fixture
def exits(files: AttemptFiles, warnings: list[tuple[int, str]]) -> Exits:
    """Nobody has ended yet."""
    return Exits(files, lambda rank, text: warnings.append((rank, text)))


@pytest.fixture
def slots(tmp_path: Path) -> Callable[..., dict[int, Slot | None]]:
    """Readings of two ranks in these states."""

    def make(*states: RankState) -> dict[int, Slot | None]:
        board = Board.create(tmp_path / "board.mmap", len(states))
        for rank, state in enumerate(states):
            writer = board.writer(rank, rank=rank, pid=100 + rank, attempt=0)
            writer.state = state
            writer.touch()
        return dict(enumerate(board.read_all()))

    return make


def ended(rank: int, **changes: Any) -> Exit:
    """A rank that left with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": rank}
    return Exit(**(fields | changes))


def killed(rank: int) -> Exit:
    """A rank that was killed."""
    return ended(rank, exit_code=None, signal=signal.SIGKILL)


Slots = Callable[..., dict[int, Slot | None]]
Warnings = list[tuple[int, str]]


def test_nobody_has_ended_at_first(exits: Exits) -> None:
    """And nobody has failed."""
    assert (exits.seen, exits.failed) == ([], [])


def test_who_ends_before_the_last_line_has_failed(exits: Exits, slots: Slots, warnings: Warnings) -> None:
    """In the order in which they were seen; code 0 is a script that ran to its end."""
    training = slots(RankState.training, RankState.training, RankState.training)
    exits.add([ended(1)], training)
    exits.add([ended(0, exit_code=EXIT_FINISHED), killed(2)], training)
    assert [(exit.rank, exit.completed) for exit in exits.seen] == [(1, False), (0, True), (2, False)]
    assert [exit.rank for exit in exits.failed] == [1, 2]
    assert warnings == []


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"exit_code": None, "signal": signal.SIGSEGV}, "was killed by SIGSEGV"),
        ({"exit_code": 3}, "exited with code 3"),
    ],
)
def test_a_bad_end_after_the_last_line_is_no_failure_and_is_said(
    exits: Exits, slots: Slots, warnings: Warnings, changes: dict[str, Any], how: str
) -> None:
    """A library's destructor may crash: the work was done."""
    exits.add([ended(1, **changes)], slots(RankState.training, RankState.done))
    assert exits.failed == []
    assert exits.seen[0].completed
    ((rank, text),) = warnings
    assert rank == 1
    assert f"rank 1 {how} after its script had completed" in text


@pytest.mark.parametrize("code", [EXIT_FINISHED, EXIT_STOPPED])
def test_a_good_end_needs_no_words(exits: Exits, slots: Slots, warnings: Warnings, code: int) -> None:
    """Finished, or stopped as it was asked to."""
    exits.add([ended(0, exit_code=code)], slots(RankState.done))
    assert exits.seen[0].completed
    assert warnings == []


@pytest.mark.parametrize("readings", [{}, {0: None}])
def test_without_a_slot_the_exit_code_tells(exits: Exits, readings: dict[int, Slot | None]) -> None:
    """A slot that cannot be read is no script that ran to its end."""
    exits.add([killed(0)], readings)
    exits.add([ended(0, exit_code=EXIT_FINISHED)], readings)
    assert [exit.completed for exit in exits.seen] == [False, True]


def test_an_exit_has_the_error_its_rank_left_behind(exits: Exits, files: AttemptFiles) -> None:
    """Its own, and none where it had no time to write one."""
    value = {"type": "KeyError", "message": "x", "traceback": "t", "location": None, "wall_time": 5.0}
    files.error(1).write_text(json.dumps(value))
    exits.add([ended(0), ended(1)], {})
    first, second = exits.seen
    assert first.error is None
    assert second.error is not None
    assert second.error.type == "KeyError"


class Ranks:
    """Ranks that end when they are waited for; each wait takes a tenth of a second of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exit | None) -> None:
        self.now = 100.0
        self.asked: list[float] = []
        self._ends = list(ends)
        self.alive = {exit.rank: exit.pid for exit in ends if exit is not None} or {0: 100}
        monkeypatch.setattr(exits_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, seconds: float) -> list[Exit]:
        """The next end."""
        self.asked.append(seconds)
        self.now += 0.1
        end = self._ends.pop(0) if self._ends else None
        if end is None:
            return []
        del self.alive[end.rank]
        return [end]


def test_waiting_ends_with_the_last_rank(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left to wait for; what was seen before stays first."""
    exits.add([ended(2)], {})
    ranks = Ranks(monkeypatch, ended(1), None, killed(0))
    exits.wait(ranks, 60.0, {})  # type: ignore[arg-type]
    assert [exit.rank for exit in exits.seen] == [2, 1, 0]
    assert ranks.asked == pytest.approx([60.0, 59.9, 59.8])


def test_waiting_has_a_deadline(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that live on are not waited for, and no wait is longer than what is left."""
    ranks = Ranks(monkeypatch)
    exits.wait(ranks, 0.25, {})  # type: ignore[arg-type]
    assert ranks.asked == pytest.approx([0.25, 0.15, 0.05])
    assert exits.seen == []


def test_an_exit_that_was_waited_for_is_judged_like_any(
    exits: Exits, slots: Slots, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the readings that were given."""
    ranks = Ranks(monkeypatch, killed(0))
    exits.wait(ranks, 1.0, slots(RankState.done))  # type: ignore[arg-type]
    assert exits.failed == []
    assert [rank for rank, _ in warnings] == [0]
