"""A collective is logged with its line, its sizes, and the sequence number that torch gives it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.builders.trainers.recorded_collectives import Handle, entries
from support.collective_entries import add_entry

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.collective_recorder import MAX_TENSORS, OwnLog, Recorder
from grpo_run.runtime.upstream import torch_names
from grpo_run.watchdog.deadlocks.collectives import operation_name


def here() -> int:
    """Return the caller's line number."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_collective_is_logged_with_the_users_line(
    installed: Recorder, board: Board, slot: SlotWriter
) -> None:
    """Operation, sizes, members and step; torch's own frames are skipped."""
    slot.step = 7
    tensor = torch.ones(2, 3)
    line = here() + 1
    dist.all_reduce(tensor)
    (entry,) = entries(board)
    assert (entry.group, entry.operation, entry.step) == ("0", "all_reduce", 8)
    assert (entry.sizes, entry.dtypes, entry.members) == (((2, 3),), ("Float",), (0,))
    assert entry.location is not None
    assert (Path(entry.location.file).name, entry.location.line) == (Path(__file__).name, line)
    assert "test_a_collective_is_logged_with_the_users_line".startswith(entry.location.function)


def test_input_sizes_are_logged_if_outputs_come_first(installed: Recorder, board: Board) -> None:
    """As in the Flight Recorder; outputs differ from inputs in size."""
    dist.reduce_scatter(torch.zeros(5), [torch.ones(5)])
    dist.all_gather_single(torch.zeros(6), torch.ones(6))
    assert [entry.sizes for entry in entries(board)] == [((5,),), ((6,),)]


def test_a_collective_without_inputs_is_logged_without_sizes(
    recorder: Recorder, board: Board, group: None
) -> None:
    """Its outputs are not inputs."""
    recorder.log(dist.group.WORLD, "gather", ([[torch.ones(1)]],))
    (entry,) = entries(board)
    assert (entry.operation, entry.sizes, entry.dtypes) == ("gather", (), ())


@pytest.mark.parametrize("many", [MAX_TENSORS, MAX_TENSORS + 1])
def test_sizes_of_many_tensors_are_logged_completely_or_not_at_all(
    recorder: Recorder, board: Board, group: None, many: int
) -> None:
    """A part of them would differ from the complete."""
    recorder.log(dist.group.WORLD, "allreduce_coalesced", ([torch.ones(3)] * many,))
    (entry,) = entries(board)
    complete = many <= MAX_TENSORS
    assert entry.sizes == (((3,),) * many if complete else ())
    assert set(entry.dtypes) == ({"Float"} if complete else set())


def test_entries_of_one_line_have_their_own_group_and_sizes(installed: Recorder, board: Board) -> None:
    """The constant part of an entry is encoded once per line, input and group; each group counts."""
    other = dist.new_group([0])
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.long), torch.ones(3)):
        for group in (dist.group.WORLD, other):
            dist.all_reduce(tensor, group=group)
    seen = [(entry.sizes, entry.dtypes, entry.group) for entry in entries(board)]
    assert seen == [
        (((size,),), (dtype,), group)
        for size, dtype in ((3, "Float"), (4, "Float"), (4, "Long"), (3, "Float"))
        for group in ("0", other.group_name)
    ]
    assert [(one.sequence, one.members) for one in entries(board)[1::2]] == [(n, (0,)) for n in range(1, 5)]
    dist.destroy_process_group(other)


def test_two_collectives_of_one_function_have_their_own_lines(installed: Recorder, board: Board) -> None:
    """Also if they are alike."""
    tensor, line = torch.ones(2), here()
    for _ in range(2):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    lines = [entry.location.line for entry in entries(board) if entry.location is not None]
    assert lines == [line + 2, line + 3] * 2


@pytest.mark.parametrize("name", torch_names.COLLECTIVE_METHODS)
def test_every_method_name_fits_an_entry(board: Board, slot: SlotWriter, name: str) -> None:
    """A truncated name would be another operation."""
    add_entry(slot.collective_log, operation=name)
    assert entries(board)[0].operation == operation_name(name)


def test_a_vote_is_logged_under_its_own_group(recorder: Recorder, board: Board) -> None:
    """Torch's Python layer does not know that group."""
    OwnLog(recorder, "grpo_run/vote", world_size=3).issued(7, "allreduce", torch.ones(8), Handle())
    (entry,) = entries(board)
    assert (entry.group, entry.sequence, entry.operation) == ("grpo_run/vote", 7, "all_reduce")
    assert (entry.members, entry.sizes, entry.dtypes) == ((0, 1, 2), ((8,),), ("Float",))
