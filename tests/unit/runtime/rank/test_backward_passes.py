"""Backward passes of DDP models in a script's own loop are logged, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.collective_log import is_in_backward
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.collective_recorder import Recorder, log_backward_passes
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective


@pytest.fixture
def recorder(slot: SlotWriter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder that logs backward passes, in a default group of this process alone."""
    monkeypatch.setattr(DistributedDataParallel, "__init__", DistributedDataParallel.__init__)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    recorder = Recorder(slot)
    log_backward_passes(recorder, distributed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield recorder
    dist.destroy_process_group()


def passes(board: Board) -> list[Collective]:
    """The backward passes in the log."""
    return [entry for entry in board.collective_log(0) if entry.operation == BACKWARD]


def test_a_backward_pass_of_a_script_is_logged_while_it_lasts(
    recorder: Recorder, board: Board, slot: SlotWriter
) -> None:
    """One entry with the line of the script; the watchdog reads records as long as it has not ended."""
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    inside: list[bool] = []

    def look(gradient: torch.Tensor) -> None:
        reading = board.read(0)
        assert reading is not None
        inside.append(is_in_backward(board.copy_log(0), reading.collectives_issued))

    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(look)
    loss.backward()
    (entry,) = passes(board)
    assert entry.completed
    assert entry.location is not None
    assert entry.location.file.endswith("test_backward_passes.py")
    assert inside == [True]
    reading = board.read(0)
    assert reading is not None
    assert not is_in_backward(board.copy_log(0), reading.collectives_issued)
    assert model.module.weight.grad is not None


def test_a_pass_without_an_all_reduce_is_not_logged(recorder: Recorder, board: Board) -> None:
    """Neither one that only accumulates gradients, nor one without a DDP model, nor one that is logged
    already.
    """
    torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    assert passes(board) == []
    with recorder.backward(model):
        model(torch.ones(1, 2)).sum().backward()
    assert len(passes(board)) == 1


def test_models_that_share_a_group_are_one_entry(recorder: Recorder, board: Board) -> None:
    """Two entries would stand for one sequence number."""
    models = [DistributedDataParallel(torch.nn.Linear(2, 1)) for _ in range(2)]
    sum(model(torch.ones(1, 2)).sum() for model in models).backward()
    assert len(passes(board)) == 1
