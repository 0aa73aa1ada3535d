"""Fixtures: a session of a rank with a real board and journal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.journal import event

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.memory.phases import PhaseAccounting, ResidentMemory
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import VoteGroup
from grpo_run.watchdog.observation import Slot


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board with one slot."""
    return Board.create(tmp_path / "board.mmap", 1)


@pytest.fixture
def slot(board: Board) -> SlotWriter:
    """The rank's slot."""
    return board.writer(0, rank=0, pid=4711, attempt=0)


@pytest.fixture
def reading(board: Board, slot: SlotWriter) -> Callable[[], Slot]:
    """Return what a reader of the board sees in the slot now."""

    def read() -> Slot:
        seen = board.read(0)
        assert seen is not None
        return seen

    return read


@pytest.fixture
def session(
    board: Board, slot: SlotWriter, journal: Journal, make_settings: Callable[..., RankSettings]
) -> Any:
    """The part of a session that the guard uses. Its vote group needs no store and no peers."""
    notified: list[str] = []

    def warn(text: str) -> None:
        if made.is_main:
            notified.append(text)
            journal.write(event("warning", rank=0, text=text))

    settings = make_settings()
    made = SimpleNamespace(
        keep_process_group=lambda: None, record_imports=lambda: None,
        board=board, slot=slot, journal=journal, settings=settings, config=settings.config,
        rank=0, world_size=1, local_world_size=1, hosts=1, rejected_checkpoints=0, own_steps=0,
        left=None, script_ended=False, fences={},
        is_main=True, is_rank=True, votes=VoteGroup(),
        device_memory=DeviceMemory(), host_memory=ResidentMemory(),
        on_phase_change=[],
        accounting=PhaseAccounting(
            slot.memory_area, DeviceMemory().read, ResidentMemory().read, warn=notified.append
        ),
        notified=notified, notify=notified.append, warn=warn,
        warn_in_journal=lambda text: journal.write(event("warning", rank=0, text=text)),
    )  # fmt: skip
    methods = (Session.fence, Session.record_left_loop, Session.script_raised, Session.script_returned)
    for method in methods:
        setattr(made, method.__name__, functools.partial(method, made))
    return made
