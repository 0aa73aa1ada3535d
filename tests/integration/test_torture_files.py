"""After random damage to checkpoint files, the newest undamaged checkpoint is chosen, never a damaged one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grpo_run.runtime.checkpoints.completeness import find_problems
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall, remove_manifest
from grpo_run.runtime.checkpoints.search import find_checkpoints

if TYPE_CHECKING:
    from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeRequest

STEPS = (2, 4, 6)
TRIALS = 200


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for real and return an output directory with three checkpoints."""
    folder = tmp_path_factory.mktemp("written")
    from support.trained_checkpoints import train

    train(folder, steps=max(STEPS), save_steps=2)
    assert [found.manifest.step for found in find_checkpoints(folder)] == sorted(STEPS, reverse=True)
    return folder


def question(folder: Path, **changes: Any) -> ResumeRequest:
    """Return the question of a later attempt of the run that wrote the checkpoints."""
    from grpo_run.runtime.rank.resuming.request import ResumeRequest

    fields: dict[str, Any] = {
        "call": TrainCall(ordinal=1, trainer_class="Trainer", output_dir=str(folder)), "run_id": "run-1",
        "world_size": 1, "first_attempt": False, "run_started_at": 0.0, "script_argument": None,
        "resume_from": None,
    }  # fmt: skip
    return ResumeRequest(**(fields | changes))


def flip(content: bytes, dice: random.Random) -> bytes:
    """Flip a random bit."""
    changed = bytearray(content)
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(content: bytes, dice: random.Random) -> bytes:
    """Truncate at a random byte."""
    return content[: dice.randrange(len(content))]


def files(folder: Path) -> list[Path]:
    """Return every file of every checkpoint, manifests included."""
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def test_no_damaged_checkpoint_is_ever_chosen(written: Path, tmp_path: Path) -> None:
    """After random damage to one to three files, the newest undamaged checkpoint is chosen, or none."""
    from grpo_run.runtime.rank.resuming.choice import choose

    dice, folder = random.Random(200), tmp_path / "out"
    shutil.copytree(written, folder)
    everything = files(folder)
    assert {MANIFEST, "model.safetensors", "optimizer.pt", "rng_state.pth"} <= {
        file.name for file in everything
    }
    chosen: list[int | None] = []
    for trial in range(TRIALS):
        # the newest checkpoint more often, because it would be chosen
        newest = [file for file in everything if file.parent.name == f"checkpoint-{max(STEPS)}"]
        hit = {dice.choice(newest if count == 0 else everything) for count in range(dice.randint(1, 3))}
        original = {file: file.read_bytes() for file in hit}
        for file, content in original.items():
            damage: Callable[[bytes, random.Random], bytes] = dice.choice([flip, cut])
            file.write_bytes(damage(content, dice))
        damaged = {file.parent for file in hit}
        intact = [step for step in STEPS if folder / f"checkpoint-{step}" not in damaged]
        rejected: list[RejectedCheckpoint] = []
        answer = choose(question(folder), rejected.append)
        expected = str(folder / f"checkpoint-{max(intact)}") if intact else None
        assert answer.argument == expected, (trial, hit)
        newer = {path for path in damaged if not intact or int(path.name.split("-")[1]) > max(intact)}
        assert {one.path for one in rejected if one.corrupt} == newer, (trial, hit, rejected)
        chosen.append(max(intact, default=None))
        for file, content in original.items():
            file.write_bytes(content)
    assert set(chosen) == {None, *STEPS[:-1]}
    assert choose(question(folder), lambda one: None).argument == str(folder / f"checkpoint-{max(STEPS)}")


def test_no_truncated_checkpoint_without_a_manifest_is_chosen(written: Path, tmp_path: Path) -> None:
    """`resume_from_checkpoint=True` without manifests skips checkpoints with a truncated or missing file."""
    from grpo_run.runtime.rank.resuming.choice import choose

    dice, folder = random.Random(60), tmp_path / "out"
    shutil.copytree(written, folder)
    for step in STEPS:
        remove_manifest(folder / f"checkpoint-{step}")
    asking = question(folder, script_argument=True, first_attempt=True)
    newest = folder / f"checkpoint-{max(STEPS)}"
    assert choose(asking, lambda one: None).argument == str(newest)
    assert {file.name for file in files(newest)} >= {
        "model.safetensors",
        "trainer_state.json",
        "scheduler.pt",
    }
    for _ in range(60):
        file = dice.choice(files(newest))
        content = file.read_bytes()
        if dice.random() < 0.3 and file.name != "training_args.bin":
            file.unlink()
        else:
            file.write_bytes(cut(content, dice))
        assert choose(asking, lambda one: None).argument == str(folder / "checkpoint-4"), file
        file.write_bytes(content)
    assert find_problems(newest, 1, verify_checksums=True) == []
