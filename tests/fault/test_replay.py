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
OTHER_SCORES = """\
    from pathlib import Path

    import torch

    if Path("changed").exists():
        trainer.model.model.norm.register_forward_hook(
            lambda module, given, made: made * 1.001 if torch.is_grad_enabled() else made
        )
"""
"""Before the training of a script. The second changes what the policy computes outside of generation."""


def steps(output: Path, last: int, *more: str) -> tuple[str, ...]:
    """Return arguments of a script: a checkpoint every four steps, of which one is left."""
    rest = ("--save-steps", "4", "--save-total-limit", "1", "--logging-steps", "1")
    return ("--output-dir", str(output), "--max-steps", str(last), *rest, *more)


def replayed(run: Run, step: int, *options: str, terminal: int | None = None) -> tuple[int, str]:
    """Return the exit code of a replay, and the last line that it prints. It must leave nothing."""
    code, lines = printed(run, step, *options, terminal=terminal)
    return code, lines[-1]


def printed(run: Run, step: int, *options: str, terminal: int | None = None) -> tuple[int, list[str]]:
    """Return the exit code of a replay, and the lines that it prints. It must leave nothing.

    It starts cold: a warm start would leave the frames of the command when it forks the ranks' server.
    """
    before, output = sorted(run.directory.rglob("*")), run.folder / "printed"
    words = [*run.program, "replay", str(run.directory), "--step", str(step), *options]
    with open(output, "wb") as file:
        process = warm.start(
            words, cwd=Path("/"), environment=run.environment, stdout=file, stdin=terminal, cold=True
        )
        code = process.wait(120)
    assert sorted(run.directory.rglob("*")) == before, output.read_text()
    return code, output.read_text().splitlines()


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
    for said in ("8 samples with rewards and log-probabilities", "on 2 ranks", "what was logged of 1 step"):
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
    assert last.startswith("step 4 differs: prompt of sample 4 on rank 1: recorded digest ")


@pytest.mark.full
@pytest.mark.timeout(200)
def test_log_probabilities_differ_before_the_loss(runs: Runs, tmp_path: Path) -> None:
    """The completions and rewards are those of the run, and the policy computes otherwise."""
    script = tmp_path / "script.py"
    before_training(script, OTHER_SCORES)
    words = (*TWO_RANKS, "--keep-every", "2", str(script), *steps(tmp_path / "out", 4))
    run = runs(*words, environment=WITH_SCRIPTS).start().ended()
    (tmp_path / "changed").touch()
    code, last = replayed(run, 4)
    assert code == EXIT_DIFFERENT
    said = r"step 3 differs: log-probabilities of sample [0-3] on rank 0: recorded -[0-9.]+ in all \(digest "
    assert re.match(said, last), last


@pytest.mark.timeout(200)
def test_a_step_is_repeated_without_a_sample(runs: Runs, tmp_path: Path) -> None:
    """Also in a later step of its rollout, from before it; the run is not changed."""
    more = ("--steps-per-generation", "2", "--save-total-limit", "3")
    words = (*TWO_RANKS, "--keep-every", "5", str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 6, *more))
    run = runs(*words).start().ended()
    before = contents(tmp_path / "out")
    code, lines = printed(run, 6, "--drop-sample", "5,14")
    assert code == 0, lines
    rows = {row[0]: row[1:] for line in lines[2:] if (row := re.split("  +", line))}
    assert {name for name, values in rows.items() if values[1] == "left out"} == {
        "sample 5, advantage", "sample 14, advantage",
    }  # fmt: skip
    assert {name for name in rows if "reward overlap" in name} == {
        f"sample {number}, reward overlap" for number in (*range(4, 8), *range(12, 16))
    } | {"reward overlap, mean"}
    for name in ("loss", "gradient norm", "reward overlap, mean", "sample 4, advantage"):
        ours, theirs = map(float, rows[name])
        assert ours != theirs, name
    assert contents(tmp_path / "out") == before
    assert replayed(run, 6)[0] == 0
    code, last = replayed(run, 6, "--drop-sample", "16")
    assert (code, last) == (EXIT_USAGE, "grpo-run: --drop-sample 16: the samples of step 5 are 0 to 15")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_step_is_repeated_with_other_rewards(runs: Runs, tmp_path: Path) -> None:
    """By the same function, everything is as recorded; a file that fails is refused."""
    words = (*TWO_RANKS, "--keep-every", "2", str(SCRIPTS / TRAINER), *steps(tmp_path / "out", 4))
    run = runs(*words).start().ended()
    file = tmp_path / "rewards.py"

    def values(text: str) -> tuple[int, list[list[str]]]:
        file.write_text(text)
        code, lines = printed(run, 4, "--reward-file", str(file))
        return code, [re.split("  +", line)[1:] for line in lines[2:]]

    same = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nimport tiny\noverlap = tiny.rewards(0.0)\n"
    code, found = values(same)
    assert code == 0
    assert len(found) == 3
    assert all(ours == theirs for ours, theirs in found)
    code, found = values(
        "def overlap(completions, **columns):\n    return [1.0 * i for i, _ in enumerate(completions)]"
    )
    assert code == 0
    assert [theirs for _, theirs in found[3:11:2]] == ["0", "1", "2", "3"]
    code, _ = values("import nothing_there\ndef overlap(**columns): ...")
    assert code == EXIT_USAGE


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
