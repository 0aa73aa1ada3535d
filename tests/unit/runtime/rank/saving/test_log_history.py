"""The log history of snapshots: written once, complete on disk, and given back to a run that resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.slots import snapshot
from transformers import TrainerState

from grpo_run.runtime.errors import CheckpointError, NoHeadroomError
from grpo_run.runtime.rank.saving import _log_history as log_history
from grpo_run.runtime.rank.saving._log_history import LogHistory
from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.log_history import SEGMENTS, read_segments
from grpo_run.runtime.snapshots.slot import StagingSlot

FLAT = [{"loss": 0.1 * step, "step": step, "a longer name/é": 1e-7} for step in range(3)]
ODD = [
    {"nan": math.nan, "infinite": -math.inf, "large": 10**30, "none": None, "true": True},
    {"text": 'é "quoted"\n \ud800', "empty": ""},
    {},
    {"nested": {"b": [1, {"z": [], "y": {}}], "a": (1.5, None)}, "list": []},
    {10: "ten", 2: "two"},
    {"numpy": numpy.float64(0.1), "b": 1, "a": 2},
    {"loss": 1.0, "step": 9},
]


class Rank:
    """A rank that takes snapshots of a trainer's state."""

    def __init__(self, session: Any, area: Path) -> None:
        session.config = replace(session.config, snapshot_directory=area)
        self.session = session
        self.staging = StagingArea(area)
        self.history = LogHistory(session)
        self.state = TrainerState(global_step=5, log_history=[])
        self.out = area.parent / "out"

    def take(self, index: int = 0) -> StagingSlot:
        """Take a snapshot as the trainer does."""
        slot, staged = self.staging.slots[index], snapshot(self.out)
        slot.begin_snapshot()
        slot.prepare_snapshot(staged)
        folder = slot.files / staged.folder
        folder.mkdir(parents=True)
        with self.history.stored_apart(self.state, folder):
            self.state.save_to_json(str(folder / "trainer_state.json"))
        slot.record_files(staged)
        slot.complete_snapshot()
        return slot

    def drain(self, slot: StagingSlot) -> DrainPublished | DrainFailed:
        """Write the slot to disk."""
        return handle_request(self.staging, DrainRequest(slot=slot.index), lambda written: None)

    def next_attempt(self, slot: StagingSlot) -> Rank:
        """Return a rank that has resumed from the slot."""
        resumed = Rank(self.session, self.staging.path)
        with resumed.history.restored():
            path = str(slot.files / "checkpoint-5" / "trainer_state.json")
            TrainerState.load_from_json(path)
            resumed.state = TrainerState.load_from_json(path)
        return resumed

    @property
    def segments(self) -> list[Path]:
        """The files of segments."""
        return sorted((self.staging.path / SEGMENTS).iterdir())


@pytest.fixture
def rank(session: Any, tmp_path: Path) -> Rank:
    """Rank 0 of a run."""
    return Rank(session, tmp_path / "memory")


def expected(state: TrainerState, folder: Path) -> bytes:
    """Return what transformers writes."""
    path = folder / "expected.json"
    state.save_to_json(str(path))
    return path.read_bytes()


def drained(rank: Rank, slot: StagingSlot) -> bytes:
    """Return the file of the checkpoint on disk."""
    reply = rank.drain(slot)
    assert isinstance(reply, DrainPublished), reply
    folder = Path(reply.path)
    assert sorted(os.listdir(folder)) == ["MANIFEST.json", "trainer_state.json"]
    return (folder / "trainer_state.json").read_bytes()


@pytest.mark.parametrize("entries", [[], FLAT, ODD, FLAT + ODD + FLAT], ids=["none", "flat", "odd", "mixed"])
def test_a_checkpoint_has_the_file_that_transformers_writes(
    rank: Rank, tmp_path: Path, entries: list[Any]
) -> None:
    """Byte for byte, also when the entries come one at a time, and after a resume."""
    for number, entry in enumerate(entries):
        rank.state.log_history.append(entry)
        rank.take(number % 2)
    slot = rank.take(2)
    whole = expected(rank.state, tmp_path)
    assert drained(rank, slot) == whole
    assert [segment.path for segment in read_segments(slot.path)] == ["slot2/LOG_HISTORY.tail"] * bool(
        entries
    )
    resumed = rank.next_attempt(slot)
    on_disk = TrainerState.load_from_json(str(tmp_path / "expected.json"))
    assert expected(resumed.state, tmp_path) == expected(on_disk, tmp_path)
    assert drained(resumed, resumed.take(1)) == whole


def test_a_full_segment_is_not_written_again(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt goes on from the segments of the last."""
    monkeypatch.setattr(log_history, "SEGMENT_ENTRIES", 4)
    rank.state.log_history = [{"step": step} for step in range(9)]
    rank.take(0)
    full = rank.segments
    assert len(full) == 2
    resumed = rank.next_attempt(rank.take(1))
    assert resumed.state.log_history == rank.state.log_history
    resumed.state.log_history += [{"step": 9}, {"step": 10}]
    resumed.take(2)
    assert resumed.segments == full
    resumed.state.log_history.append({"step": 11})
    slot = resumed.take(0)
    assert len(resumed.segments) == 3
    assert set(full) < set(resumed.segments)
    assert rank.next_attempt(slot).state.log_history == resumed.state.log_history


def _edit_recent(history: list[Any]) -> None:
    history[-2]["note"] = "edited"


def _replace_early(history: list[Any]) -> None:
    history[0] = {"step": -1}


def _truncate(history: list[Any]) -> None:
    del history[:50]


def _shorten(history: list[Any]) -> None:
    history.pop()


@pytest.mark.parametrize("change", [_edit_recent, _replace_early, _truncate, _shorten])
def test_a_history_that_a_callback_has_changed_is_written_anew(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], None]
) -> None:
    """Segments that no slot refers to any more are deleted."""
    monkeypatch.setattr(log_history, "SEGMENT_ENTRIES", 30)
    rank.state.log_history = [{"step": step} for step in range(100)]
    for index in range(3):
        rank.take(index)
    first = set(rank.segments)
    assert len(first) == 3
    change(rank.state.log_history)
    assert drained(rank, rank.take(0)) == expected(rank.state, tmp_path)
    assert first < set(rank.segments), "two slots still refer to them"
    rank.take(1)
    rank.take(2)
    rank.state.log_history = []
    assert drained(rank, rank.take(0)) == expected(rank.state, tmp_path)
    rank.state.log_history = [{"step": step} for step in range(30)]
    rank.take(0)
    assert not first & set(rank.segments)


def test_values_that_json_does_not_have_end_no_run(rank: Rank, tmp_path: Path) -> None:
    """Transformers converts data classes. For it, the others are errors where the script saves, which may be
    never; a snapshot has what can be read of them.
    """

    @dataclass
    class Values:
        loss: float

    entries: Any = [*FLAT, {"values": Values(1.0)}]
    rank.state.log_history = entries
    slot = rank.take(0)
    assert drained(rank, slot) == expected(rank.state, tmp_path)
    unusual: Any = {"memory": torch.tensor(1.5), "counts": numpy.arange(2), "path": Path("a")}
    rank.state.log_history = [unusual]
    rank.take(1)
    slot = rank.take(2)
    plain: Any = [{"memory": 1.5, "counts": [0, 1], "path": repr(Path("a"))}]
    assert rank.next_attempt(slot).state.log_history == plain
    rank.state.log_history = plain
    assert drained(rank, slot) == expected(rank.state, tmp_path)


def test_an_entry_that_nobody_can_write_is_left_to_transformers(rank: Rank) -> None:
    """Its error says what is wrong."""
    rank.state.log_history = [{"one": 1.0, 2: 2.0}]  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="not supported between"):
        rank.take(0)


@pytest.mark.parametrize("damage", ["torn", "missing", "tail", "record"])
def test_a_damaged_history_makes_the_snapshot_invalid(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """It is neither loaded nor written to disk with a part of its history."""
    monkeypatch.setattr(log_history, "SEGMENT_ENTRIES", 2)
    rank.state.log_history = list(FLAT)
    slot = rank.take(0)
    (path,) = rank.segments
    if damage == "torn":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "missing":
        path.unlink()
    else:
        (slot.path / f"LOG_HISTORY.{'tail' if damage == 'tail' else 'json'}").write_text("{")
    staged = slot.read_snapshot()
    assert staged is not None
    with pytest.raises(CheckpointError):
        slot.check_complete(staged)
    reply = rank.drain(slot)
    assert isinstance(reply, DrainFailed)
    assert reply.broken


def test_no_memory_for_new_entries_is_a_lack_of_memory(rank: Rank, lack_memory: Callable[[], None]) -> None:
    """As for every other file; the next snapshot tries again."""
    rank.state.log_history = list(FLAT)
    rank.take(0)
    rank.state.log_history += FLAT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_history, "grant_memory", _refuse)
        with pytest.raises(NoHeadroomError):
            rank.take(1)
    assert rank.next_attempt(rank.take(1)).state.log_history == FLAT + FLAT


def _refuse(folder: Path, size_bytes: int) -> None:
    raise NoHeadroomError("full")


def test_only_rank_0_writes_and_only_into_the_staging_area(rank: Rank, tmp_path: Path) -> None:
    """A checkpoint that is written directly, or a state class of the script's own, is not changed."""
    rank.state.log_history = list(FLAT)
    with rank.history.stored_apart(rank.state, tmp_path / "out" / "checkpoint-5"):
        assert expected(rank.state, tmp_path).count(b'"step"') == 3

    class OwnState(TrainerState):  # type: ignore[misc]
        def save_to_json(self, json_path: str) -> None:
            Path(json_path).write_text("own")

    rank.state = OwnState(log_history=list(FLAT))
    slot = rank.take(0)
    assert (slot.files / "checkpoint-5" / "trainer_state.json").read_text() == "own"
    assert not (rank.staging.path / SEGMENTS).exists()


def test_a_state_that_is_read_later_is_read_anew(rank: Rank, tmp_path: Path) -> None:
    """Only the two reads at the beginning of a call share an object's history."""
    path = str(tmp_path / "state.json")
    TrainerState(log_history=list(FLAT)).save_to_json(path)
    original = vars(TrainerState)["load_from_json"]
    with rank.history.restored():
        first, second, third = (TrainerState.load_from_json(path) for _ in range(3))
    assert first == second == third
    assert first.log_history is second.log_history
    assert third.log_history is not second.log_history
    assert vars(TrainerState)["load_from_json"] is original


def test_the_size_on_disk_is_estimated(rank: Rank, tmp_path: Path) -> None:
    """The drain worker asks for as much free space."""
    rank.state.log_history = [
        {f"rewards/{name}/mean": 1 / (step + 3) for name in "abcdef"} for step in range(500)
    ]
    slot = rank.take(0)
    staged = slot.read_snapshot()
    assert staged is not None
    size_bytes = len(expected(rank.state, tmp_path))
    assert size_bytes <= slot.checkpoint_bytes(staged) < 1.3 * size_bytes
