"""The backward pass of a DDP model is logged from its start to its end."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from support.builders.trainers.recorded_collectives import entries
from torch._C import _distributed_c10d as c10d

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.runtime.upstream import torch_names
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, CollectiveProgress


class DistributedDataParallel:
    """The recorder recognizes torch's class by this name."""

    def __init__(self) -> None:
        self.process_group = dist.group.WORLD


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_is_logged_from_start_to_end(
    recorder: Recorder, board: Board, group: None, fails: bool
) -> None:
    """With the sequence number of its first all-reduce. It is complete also if it fails: a script may
    continue after an out-of-memory error, which is raised unchanged.
    """
    expected = torch_names.sequence_number(dist.group.WORLD) + 1
    raises = pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with raises, recorder.backward(DistributedDataParallel()):
        (entry,) = entries(board)
        assert (entry.operation, entry.sequence, entry.progress) == (
            BACKWARD,
            expected,
            CollectiveProgress.enqueued,
        )
        assert recorder.in_backward == {threading.get_ident()}
        if fails:
            raise ZeroDivisionError
    assert recorder.in_backward == set()
    assert entries(board)[0].progress is CollectiveProgress.completed


@pytest.mark.parametrize("kind", ["Linear", "FullyShardedDataParallel"])
def test_only_a_ddp_model_has_its_backward_logged(
    recorder: Recorder, board: Board, group: None, kind: str
) -> None:
    """A single rank and DeepSpeed have no such group; FSDP's backward issues other collectives."""
    model = type(kind, (), {"process_group": dist.group.WORLD})()
    with recorder.backward(model):
        pass
    assert entries(board) == ()


def test_a_backward_that_cannot_be_logged_runs(
    recorder: Recorder, board: Board, warnings: list[str], group: None
) -> None:
    """A foreign process group causes this."""
    model = DistributedDataParallel()
    model.process_group = c10d.ProcessGroup(dist.HashStore(), 0, 1)
    happened = False
    with recorder.backward(model):
        happened = True
    assert happened
    assert entries(board) == ()
    assert len(warnings) == 1
