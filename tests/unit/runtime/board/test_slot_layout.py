"""The layout of a slot follows from its tables."""

from __future__ import annotations

import struct
from pathlib import Path

from grpo_run.runtime.board._header import HEADER_BYTES
from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

INTEGERS = [
    "train_call", "step", "target_steps", "voted_step", "committed_step", "resumed_step", "checkpoint_step",
    "voted_at_ns", "train_started_ns", "tokens_generated", "rewards_scored", "votes", "cleanup_runs",
    "no_trainer_after", "save_state_calls",
]  # fmt: skip
FLOATS = [
    "vote_wait_seconds", "cleanup_seconds", "checkpoint_seconds", "ended_eos", "ended_length",
    "ended_repetition",
    "ended_deadline", "generation_limit", "prompt_tokens", "prompt_length",
]  # fmt: skip


def test_every_field_keeps_its_place_on_disk(tmp_path: Path) -> None:
    """Offsets and formats are part of the file format."""
    path = tmp_path / "board.mmap"
    board = Board.create(path, 2)
    writer = board.writer(1, rank=5, pid=4711, attempt=3)
    for number, name in enumerate(INTEGERS, start=1):
        setattr(writer, name, number)
    for number, name in enumerate(FLOATS, start=1):
        setattr(writer, name, number / 4)
    writer.log(dict(zip(LOGGED_FIELDS, range(100), strict=False)))
    writer.publish()
    slot = path.read_bytes()[HEADER_BYTES + SLOT_BYTES :]
    assert struct.unpack_from("<IIII", slot, 8) == (5, 1, 4711, 3)
    assert struct.unpack_from("<iiiiiiiQQQQQQHI", slot, 256) == tuple(range(1, 16))
    assert struct.unpack_from("<11d", slot, 384) == (*(number / 4 for number in range(1, 11)), 0.0)
    assert struct.unpack_from(f"<{len(LOGGED_FIELDS)}d", slot, 576) == tuple(range(len(LOGGED_FIELDS)))
