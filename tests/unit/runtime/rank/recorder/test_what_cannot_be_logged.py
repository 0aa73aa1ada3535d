"""A collective that cannot be logged is issued all the same, with one warning."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.builders.trainers.recorded_collectives import Handle, entries
from torch._C import _distributed_c10d as c10d

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.collective_recorder import OwnLog, Recorder
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress


def test_a_collective_that_cannot_be_issued_raises_torchs_error(installed: Recorder, board: Board) -> None:
    """The next collective works."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_gather_single(torch.ones(3), torch.ones(2))
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed


def nameless_group() -> Any:
    """A Gloo group without a name, which torch's Python layer does not know."""
    group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group


def named_group() -> Any:
    """A Gloo group with a name that torch's Python layer does not know."""
    group = nameless_group()
    group._set_group_name("mine")
    return group


@pytest.mark.parametrize("make", [nameless_group, named_group])
def test_a_collective_of_a_foreign_group_is_issued_without_an_entry(
    installed: Recorder, board: Board, warnings: list[str], make: Callable[[], Any]
) -> None:
    """There is one warning, however many collectives follow."""
    foreign = make()
    for _ in range(3):
        tensor = torch.full((2,), 5.0)
        foreign.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((2,), 5.0))
    assert entries(board) == ()
    (warning,) = warnings
    assert "allreduce could not be logged (" in warning
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_collective_of_a_backend_without_sequence_numbers_is_issued_without_an_entry(
    installed: Recorder, board: Board, warnings: list[str]
) -> None:
    """It could not be compared with those of other ranks."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    fake = dist.new_group([0], backend="fake")
    before = len(entries(board))
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=fake)
    assert len(entries(board)) == before
    assert len(warnings) == 1
    dist.destroy_process_group(fake)


def test_symbolic_sizes_are_no_reason_to_lose_an_entry(
    recorder: Recorder, board: Board, group: None, warnings: list[str]
) -> None:
    """A traced tensor has sizes without a hash."""

    class Symbol(list[str]):
        """Has no hash, and a name."""

        def __str__(self) -> str:
            return "s0"

    traced = SimpleNamespace(shape=(Symbol(), 3), dtype=torch.float32, is_cpu=True)
    for _ in range(2):
        recorder.log(dist.group.WORLD, "allreduce", ([traced],))
    assert [(entry.operation, entry.sizes) for entry in entries(board)] == [("all_reduce", ())] * 2
    assert warnings == []


class OddError(Exception):
    """An error that no caller expects."""


def test_a_vote_that_cannot_be_logged_is_issued(
    recorder: Recorder, board: Board, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error is tolerated, with one warning."""

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OddError("no")

    monkeypatch.setattr(recorder._calls, "describe", fail)
    log = OwnLog(recorder, "grpo_run/vote", world_size=2)
    for sequence in (1, 2):
        log.issued(sequence, "allreduce", torch.ones(8), Handle())
    assert warnings == ["a vote could not be logged (OddError: no); other collectives may be missing too"]
    assert recorder._tracked == {}


def test_a_handle_that_cannot_be_tracked_is_returned(recorder: Recorder, warnings: list[str]) -> None:
    """A handle may not support weak references."""

    class Slotted:
        """A handle that does not support weak references."""

        __slots__ = ()

    OwnLog(recorder, "grpo_run/vote", world_size=2).issued(1, "allreduce", torch.ones(8), Slotted())
    assert len(warnings) == 1
    assert "a Work handle could not be logged (TypeError" in warnings[0]
