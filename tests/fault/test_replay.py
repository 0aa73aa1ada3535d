"""A step is done again bit for bit, and the first thing that differs is named."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from pathlib import Path

import pytest
from support import warm
from support.runs import SCRIPTS, WITH_SCRIPTS, Run, Runs, before_training
from support.trainer_and_loop import LOOP, TRAINER

from grpo_run.cli.replay import EXIT_DIFFERENT
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from grpo_run.runtime.errors import EXIT_USAGE

TWO_RANKS = ("--nproc-per-node", "2")
CHANGE = """\
    from pathlib import Path

    if Path("changed").exists():
        rows = [row["prompt"] for row in trainer.train_dataset]
        rows[rows.index(Path("changed").read_text())] = "9.9.9."
        trainer.train_dataset = trainer.train_dataset.from_dict({"prompt": rows})
"""
"""Before the training of a script."""


def steps(output: Path, last: int, *more: str) -> tuple[str, ...]:
    """Return arguments of a script: a checkpoint every four steps, of which one is left."""
    rest = ("--save-steps", "4", "--save-total-limit", "1", "--logging-steps", "1")
    return ("--output-dir", str(output), "--max-steps", str(last), *rest, *more)


def replayed(run: Run, step: int, *options: str, terminal: int | None = None) -> tuple[int, str]:
    """Return the exit code of a replay, and the last line that it prints. It must leave nothing.

    It starts cold: a warm start would leave the frames of the command when it forks the ranks' server.
    """
    before, printed = sorted(run.directory.rglob("*")), run.folder / "printed"
    words = [*run.program, "replay", str(run.directory), "--step", str(step), *options]
    with open(printed, "wb") as file:
        process = warm.start(
            words, cwd=Path("/"), environment=run.environment, stdout=file, stdin=terminal, cold=True
        )
        code = process.wait(120)
    assert sorted(run.directory.rglob("*")) == before, printed.read_text()
    return code, printed.read_text().splitlines()[-1]


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return when each file of a folder was changed, and its size."""
    return {
        file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.rglob("*") if file.is_file()
    }


def flip(checkpoint: Path, name: str) -> None:
    """Flip one bit of a weight in a checkpoint, and let its manifest agree."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    begin, _ = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    content[8 + size + begin + 2] ^= 1 << 3
    file.unlink()  # other links of it keep their content
    file.write_bytes(content)
    identity = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, identity)


@pytest.mark.timeout(120)
def test_a_step_is_equal_until_a_weight_of_its_checkpoint_is_flipped(runs: Runs, tmp_path: Path) -> None:
    """The weight is the first difference, and nothing of the run is touched."""
    words = (*TWO_RANKS, "--keep-every", "2", str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 5))
    run = runs(*words).start().ended()
    before = contents(tmp_path / "out")
    code, last = replayed(run, 5)
    assert (code, last.partition(":")[0]) == (0, "step 5 is equal"), last
    for said in ("8 samples with rewards", "on 2 ranks", "what was logged of 1 step"):
        assert said in last
    assert contents(tmp_path / "out") == before
    (kept,) = (tmp_path / "out").rglob("snapshot-4")
    flip(kept, "model.layers.1.mlp.up_proj.weight")
    code, last = replayed(run, 5)
    assert code == EXIT_DIFFERENT
    assert last.startswith("step 4 differs: tensor model.layers.1.mlp.up_proj.weight on rank 0: recorded ")


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_twenty_steps_of_a_run_with_two_recoveries_are_equal(runs: Runs, tmp_path: Path) -> None:
    """Steps at random, also those that were done twice."""
    kills = ("--inject", "kill@rank1:step7", "--inject", "kill@rank0:step18")
    words = (*TWO_RANKS, "--keep-every", "3", *kills, str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 28))
    run = runs(*words).start().ended()
    assert len(run.status()["recoveries"]) == 2
    for step in random.Random(7).sample(range(4, 29), 20):
        code, last = replayed(run, step)
        assert (code, last.partition(":")[0]) == (0, f"step {step} is equal"), last


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "mode"),
    [
        (TRAINER, "zero2"),
        (TRAINER, "zero3"),
        (TRAINER, "fsdp2"),
        ("rloo.py", ""),
        (LOOP, ""),
        ("sft.py", ""),
        ("sft_then_grpo.py", ""),
    ],
)
def test_every_kind_of_run_is_equal_through_a_recovery(
    script: str, mode: str, runs: Runs, tmp_path: Path
) -> None:
    """Weights and moments as far as a rank holds them."""
    words = (*TWO_RANKS, "--keep-every", "3", "--inject", "kill@rank1:step5")
    run = runs(*words, str(SCRIPTS / script), *steps(tmp_path / "out", 8), mode=mode).start().ended()
    before = contents(tmp_path / "out")
    for step in (4, 8):
        code, last = replayed(run, step)
        assert (code, last.partition(":")[0]) == (0, f"step {step} is equal"), last
        assert re.search("[0-9]{2,} tensors after .* on 2 ranks", last), last
    assert contents(tmp_path / "out") == before


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_changed_sample_is_the_first_difference(runs: Runs, tmp_path: Path) -> None:
    """One prompt of the data set is another one in the replay."""
    script, changed = tmp_path / "script.py", tmp_path / "changed"
    before_training(script, CHANGE)
    words = (*TWO_RANKS, "--keep-every", "2", "--log-completions", "9", str(script))
    run = runs(*words, *steps(tmp_path / "out", 6), environment=WITH_SCRIPTS).start().ended()
    lines = map(json.loads, (run.directory / "completions" / "rank1.jsonl").read_text().splitlines())
    changed.write_text(next(line["prompt"] for line in lines if line["step"] == 4))
    code, last = replayed(run, 6)
    assert (code, last.partition(":")[0]) == (0, "step 6 is equal")
    code, last = replayed(run, 4)
    assert code == EXIT_DIFFERENT
    assert last.startswith("step 4 differs: prompt of sample 0 on rank 1: recorded digest ")


@pytest.mark.full
@pytest.mark.timeout(200)
def test_without_kept_checkpoints_the_last_ones_serve(runs: Runs, tmp_path: Path) -> None:
    """What was logged is compared, and weights with the checkpoint; other steps are refused in one line."""
    run = (
        runs(*TWO_RANKS, str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 8, "--save-total-limit", "2"))
        .start()
        .ended()
    )
    code, last = replayed(run, 8)
    assert (code, last.partition(":")[0]) == (0, "step 8 is equal")
    assert re.search("what was logged of 4 steps.* tensors of the checkpoint of step 8", last), last
    for step, said in ((3, "steps 5 to 8 can be replayed, "), (9, "has reached step 8")):
        code, last = replayed(run, step)
        assert code == EXIT_USAGE
        assert said in last


@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_user_looks_at_a_step_while_the_other_rank_waits(runs: Runs, tmp_path: Path) -> None:
    """Longer than a proof that a rank waits for nothing takes; then the step goes on and is equal."""
    run = runs(*TWO_RANKS, "--keep-every", "2", str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 4))
    run.start().ended()
    mine, its = os.openpty()
    os.write(
        mine,
        b"import time; time.sleep(20)\nprint(type(trainer).__name__, trainer.state.global_step * 11)\n\x04",
    )
    code, last = replayed(run, 4, "--shell", "--rank", "1", terminal=its)
    assert (code, last.partition(":")[0]) == (0, "step 4 is equal")
    shown = os.read(mine, 65536).decode()
    assert "Step 4 begins on rank 1" in shown
    assert "GRPOTrainer 33" in shown
