"""A trainer writes its checkpoint where it is told to, and is left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.saving import Trainer
from support.slots import snapshot
from transformers import TrainerState

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents, compact
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.snapshots._drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea


def test_the_output_directory_of_the_trainer_is_restored(
    tmp_path: Path, session: Any, call: TrainCall
) -> None:
    """Holds if the script has replaced the method on the trainer itself, and after an error."""
    trainer, folder = Trainer(tmp_path / "out"), tmp_path / "memory" / "checkpoint-5"
    exact: Any = SimpleNamespace(save=lambda folder: None, epoch_ended=False)
    contents = TrainerContents(trainer, TrainerFacts.of(trainer, 1), session, call, exact)
    before = vars(trainer).keys()
    assert contents.write(folder) == "what the method returns"
    assert (folder / "weights.pt").exists()
    assert vars(trainer).keys() == before
    own: Any = lambda trial=None: "mine"
    trainer._get_output_dir = own  # type: ignore[method-assign]
    contents.write(folder)
    assert trainer._get_output_dir is own

    def fail(path: Path) -> None:
        raise ValueError("a reward function's state")

    trainer.during = fail
    with pytest.raises(ValueError, match="reward"):
        contents.write(folder)
    assert trainer._get_output_dir is own


FLAT = [{"loss": 0.1 * step, "step": step, "a longer name/é": 1e-7} for step in range(3)]
ODD: list[dict[Any, Any]] = [
    {"nan": math.nan, "infinite": -math.inf, "large": 10**30, "none": None, "true": True},
    {"text": 'é "quoted"\n \ud800', "empty": ""},
    {},
    {"nested": {"b": [1, {"z": [], "y": {}}], "a": (1.5, None)}, "list": []},
    {10: "ten", 2: "two"},
    {"numpy": numpy.float64(0.1), "b": 1, "a": 2},
]


@dataclass
class Values:
    """What transformers converts."""

    loss: float


def staged_state(staging: StagingArea, out: Path, state: TrainerState) -> Path:
    """Take a snapshot of a state; return the file in memory."""
    slot, staged = staging.slots[0], snapshot(out)
    slot.begin_snapshot()
    slot.prepare_snapshot(staged)
    path = slot.files / staged.folder / "trainer_state.json"
    path.parent.mkdir(parents=True)
    with compact(state, path.parent, staging.path):
        state.save_to_json(str(path))
    slot.record_files(staged)
    slot.complete_snapshot()
    return path


def drained(staging: StagingArea) -> bytes:
    """Write the snapshot to disk; return the file of its checkpoint, which its manifest describes."""
    staged = staging.slots[0].read_snapshot()
    assert staged is not None
    needed_bytes = staging.slots[0].checkpoint_bytes(staged)
    reply = handle_request(staging, DrainRequest(slot=0), lambda written: None)
    assert isinstance(reply, DrainPublished), reply
    folder = Path(reply.path)
    verify_digests(folder, read_manifest(folder).files)
    assert reply.size_bytes <= needed_bytes
    return (folder / "trainer_state.json").read_bytes()


@pytest.mark.parametrize("entries", [[], FLAT, ODD, [{"values": Values(1.0)}]])
def test_the_state_of_a_checkpoint_on_disk_is_the_file_that_transformers_writes(
    tmp_path: Path, entries: list[Any]
) -> None:
    """Byte for byte. In memory it has no line breaks."""
    staging, path = StagingArea(tmp_path / "memory"), tmp_path / "expected.json"
    state = TrainerState(global_step=5, log_history=[*entries, {"loss": 1.0, "step": 9}])
    in_memory = staged_state(staging, tmp_path / "out", state)
    assert in_memory.read_bytes().strip().count(b"\n") == 0
    state.save_to_json(str(path))
    read = TrainerState.load_from_json(str(in_memory))
    assert drained(staging) == path.read_bytes()
    read.save_to_json(str(tmp_path / "read.json"))
    TrainerState.load_from_json(str(path)).save_to_json(str(path))
    assert (tmp_path / "read.json").read_bytes() == path.read_bytes()


def test_values_that_json_does_not_have_end_no_run(tmp_path: Path) -> None:
    """For transformers they are errors where the script saves, which may be never."""
    staging = StagingArea(tmp_path / "memory")
    unusual: Any = {"memory": torch.tensor(1.5), "counts": numpy.arange(2), "path": Path("a")}
    path = staged_state(staging, tmp_path / "out", TrainerState(log_history=[unusual]))
    plain: Any = [{"memory": 1.5, "counts": [0, 1], "path": repr(Path("a"))}]
    assert TrainerState.load_from_json(str(path)).log_history == plain


def test_no_memory_for_the_state_is_a_lack_of_memory(tmp_path: Path, lack_memory: Callable[[], None]) -> None:
    """As for every other file; nothing is written."""
    staging = StagingArea(tmp_path / "memory")
    lack_memory()
    with pytest.raises(NoHeadroomError):
        staged_state(staging, tmp_path / "out", TrainerState(log_history=list(FLAT)))


def test_a_checkpoint_that_is_written_directly_is_as_transformers_writes_it(tmp_path: Path) -> None:
    """A state class of the script's own writes itself."""
    state, path = TrainerState(log_history=list(FLAT)), tmp_path / "state.json"
    with compact(state, tmp_path / "out" / "checkpoint-5", tmp_path / "memory"):
        state.save_to_json(str(path))
    assert path.read_text().startswith("{\n")

    class OwnState(TrainerState):  # type: ignore[misc]
        def save_to_json(self, json_path: str) -> None:
            Path(json_path).write_text('{"own": 1}')

    staging = StagingArea(tmp_path / "memory")
    staged_state(staging, tmp_path / "out", OwnState())
    assert drained(staging) == b'{"own": 1}'
