"""Which ranks have exited, and which of them failed."""

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
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.supervisor import attempt as exits_module
from grpo_run.runtime.supervisor.attempt import Exits
from grpo_run.watchdog.observation import Exit, RankState, Slot


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    """Files of an attempt in which no rank has written an error."""
    files = AttemptFiles(RunDirectory(path=tmp_path / "run"), 0)
    files.make()
    return files


@pytest.fixture
def warnings() -> list[tuple[int, str]]:
    """Warnings, as (rank, text)."""
    return []


@pytest.fixture
def exits(files: AttemptFiles, warnings: list[tuple[int, str]]) -> Exits:
    """No rank has exited yet."""
    return Exits(files, lambda rank, text: warnings.append((rank, text)))


@pytest.fixture
def slots(tmp_path: Path) -> Callable[..., dict[int, Slot | None]]:
    """Return slots of ranks in these states."""

    def make(*states: RankState) -> dict[int, Slot | None]:
        board = Board.create(tmp_path / "board.mmap", len(states))
        for rank, state in enumerate(states):
            writer = board.writer(rank, rank=rank, pid=100 + rank, attempt=0)
            writer.state = state
            writer.publish()
        return dict(enumerate(board.read_all()))

    return make


def exited(rank: int, **changes: Any) -> Exit:
    """A rank that exited with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": rank}
    return Exit(**(fields | changes))


def killed(rank: int) -> Exit:
    """A rank that was killed."""
    return exited(rank, exit_code=None, signal=signal.SIGKILL)


Slots = Callable[..., dict[int, Slot | None]]
Warnings = list[tuple[int, str]]


def test_a_rank_that_exits_before_its_script_completes_has_failed(
    exits: Exits, slots: Slots, warnings: Warnings
) -> None:
    """Exits keep the order in which they were observed. Code 0 inside a `train()` call does not complete the
    script.
    """
    training = slots(RankState.training, RankState.training, RankState.training)
    exits.add([exited(1)], training)
    exits.add([exited(0, exit_code=EXIT_FINISHED), killed(2)], training)
    assert [(exit.rank, exit.completed) for exit in exits.seen] == [(1, False), (0, False), (2, False)]
    assert [exit.rank for exit in exits.failed] == [1, 0, 2]
    assert warnings == []


@pytest.mark.parametrize("state", [RankState.starting, RankState.between, RankState.done])
def test_code_0_outside_training_completes_the_script(
    exits: Exits, slots: Slots, warnings: Warnings, state: RankState
) -> None:
    """Many scripts end with `os._exit(0)`; a script without a trainer never trains. It is said if nobody has
    seen its last line.
    """
    exits.add([exited(0, exit_code=EXIT_FINISHED)], slots(state))
    assert exits.failed == []
    said = [(rank, "without running the script's last line" in text) for rank, text in warnings]
    assert said == ([] if state is RankState.done else [(0, True)])


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"exit_code": None, "signal": signal.SIGSEGV}, "was killed by SIGSEGV"),
        ({"exit_code": 3}, "exited with code 3"),
    ],
)
def test_a_crash_after_the_script_completed_is_a_warning(
    exits: Exits, slots: Slots, warnings: Warnings, changes: dict[str, Any], how: str
) -> None:
    """A destructor of a library may crash: the work is done."""
    exits.add([exited(1, **changes)], slots(RankState.training, RankState.done))
    assert exits.failed == []
    assert exits.seen[0].completed
    ((rank, text),) = warnings
    assert rank == 1
    assert f"rank 1 {how} after its script had completed" in text


@pytest.mark.parametrize("code", [EXIT_FINISHED, EXIT_STOPPED])
def test_an_expected_exit_gives_no_warning(exits: Exits, slots: Slots, warnings: Warnings, code: int) -> None:
    """The script finished, or stopped as requested."""
    exits.add([exited(0, exit_code=code)], slots(RankState.done))
    assert exits.seen[0].completed
    assert warnings == []


@pytest.mark.parametrize("readings", [{}, {0: None}])
def test_without_a_slot_the_exit_code_decides(exits: Exits, readings: dict[int, Slot | None]) -> None:
    """An unreadable slot does not mean that the script completed."""
    exits.add([killed(0)], readings)
    exits.add([exited(0, exit_code=EXIT_FINISHED)], readings)
    assert [exit.completed for exit in exits.seen] == [False, True]


def test_an_exit_has_the_error_that_its_rank_wrote(exits: Exits, files: AttemptFiles) -> None:
    """None if the rank had no time to write one."""
    value = {"type": "KeyError", "message": "x", "traceback": "t", "location": None, "wall_time": 5.0}
    files.error(1).write_text(json.dumps(value))
    exits.add([exited(0), exited(1)], {})
    first, second = exits.seen
    assert first.error is None
    assert second.error is not None
    assert second.error.type == "KeyError"


class FakeRanks:
    """Ranks that exit while they are waited for; each wait takes 0.1 s on a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exit | None) -> None:
        self.now = 100.0
        self.asked: list[float] = []
        self._ends = list(ends)
        self.alive = {exit.rank: exit.pid for exit in ends if exit is not None} or {0: 100}
        monkeypatch.setattr(
            exits_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 0.0)
        )

    def wait(self, seconds: float) -> list[Exit]:
        """Return the next exit."""
        self.asked.append(seconds)
        self.now += 0.1
        end = self._ends.pop(0) if self._ends else None
        if end is None:
            return []
        del self.alive[end.rank]
        return [end]


def test_waiting_ends_with_the_last_rank(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier exits stay first."""
    exits.add([exited(2)], {})
    ranks = FakeRanks(monkeypatch, exited(1), None, killed(0))
    exits.wait(ranks, 60.0, {})  # type: ignore[arg-type]
    assert [exit.rank for exit in exits.seen] == [2, 1, 0]
    assert ranks.asked == pytest.approx([60.0, 59.9, 59.8])


def test_waiting_has_a_deadline(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait is longer than the remaining time."""
    ranks = FakeRanks(monkeypatch)
    exits.wait(ranks, 0.25, {})  # type: ignore[arg-type]
    assert ranks.asked == pytest.approx([0.25, 0.15, 0.05])
    assert exits.seen == []


def test_an_exit_that_was_waited_for_is_recorded_like_any_other(
    exits: Exits, slots: Slots, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given slots decide whether its script completed."""
    ranks = FakeRanks(monkeypatch, killed(0))
    exits.wait(ranks, 1.0, slots(RankState.done))  # type: ignore[arg-type]
    assert exits.failed == []
    assert [rank for rank, _ in warnings] == [0]


def test_an_aborted_rank_is_explained_by_the_end_of_its_output(exits: Exits, files: AttemptFiles) -> None:
    """It has left no error; an exit of another kind is not, whatever was printed."""
    text = (
        "x" * 300_000
        + "\nterminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    )
    for rank in (0, 1):
        files.log(rank).write_text(text)
    exits.add([exited(0, exit_code=None, signal=signal.SIGABRT), exited(1, order=1)], {})
    aborted, other = exits.failed
    assert aborted.error is not None
    assert (aborted.error.message, other.error) == ("std::bad_alloc", None)
    exits.add([exited(2, exit_code=None, signal=signal.SIGABRT)], {})
    assert exits.failed[2].error is None
