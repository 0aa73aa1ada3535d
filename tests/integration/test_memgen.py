"""MemGen on several ranks: loops that end at different times, and every stage of a recipe through kills."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
from support.memgen_answers import answered, evaluated
from support.references import plain_ranks
from support.runs import SCRIPTS, Run, Runs

from grpo_run.trainers.recipes.problems import read_problems
from grpo_run.trainers.recipes.recipe import PACKAGED

RANKS = str(SCRIPTS / "memgen_ranks.py")


def test_a_rank_whose_completions_end_early_goes_on_with_the_others(runs: Runs, tmp_path: Path) -> None:
    """With votes, sharded ranks take part in every forward pass, and generate what each would alone."""
    run = runs("--nproc-per-node", "2", RANKS).start().ended()
    assert not run.events("incident"), run.tail()
    found = [json.loads((tmp_path / f"tokens-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(one["alone"] == one["together"] for one in found)
    assert [len(one["alone"][0]) for one in found] == [1, 10]


def test_the_loop_without_votes_is_a_deadlock_that_is_proved(runs: Runs) -> None:
    """One rank has left for the next decision while the other gathers weights; a restart repeats it."""
    run = runs("--nproc-per-node", "2", "--max-restarts", "1", RANKS, "--without-votes").start()
    assert run.wait() != 0, run.tail()
    first = run.verdicts()[0]
    assert first["confidence"] == "proved"
    assert "rank 1 is in all_reduce (memgen_ranks.py:" in first["sentence"]
    assert run.events("action")[0]["action"] == "restart"


STAGES = ("weaver", "grpo")
PROBLEMS, EPOCHS, ROWS = 24, 2, 4
EVALUATED = 50
SETTINGS = (
    "model=tiny", "data=.", "output_dir=out", "weaver.max_steps=-1", f"weaver.num_train_epochs={EPOCHS}",
    f"weaver.per_device_train_batch_size={ROWS}", "weaver.save_steps=2",
    "grpo.max_steps=6", "grpo.save_steps=2", "grpo.max_completion_length=12",
    f"memgen.evaluation_problems={EVALUATED}", "memgen.evaluation_batch_size=25",
)  # fmt: skip


def problems(folder: Path) -> None:
    """Write problems in GSM8K's form, whose answers have delimiters; others to train on than to evaluate."""
    folder.mkdir(exist_ok=True)
    for split, first, count in (("train", 0, PROBLEMS), ("test", PROBLEMS, EVALUATED)):
        rows = [
            {
                "question": f"Tom has {n} apples and buys {n + 1}. How many?",
                "answer": f"{n}+{n + 1}.\n#### {2 * n + 1}",
            }
            for n in range(first, first + count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(folder: Path) -> dict[str, str]:
    """Digests of what a recipe leaves: the adapters of both models, and the evaluation's lines."""
    out = folder / "out"
    files = [*(out / "final" / name / "adapter_model.safetensors" for name in ("weaver", "trigger"))]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files} | {
        "evaluation": (out / "evaluation.jsonl").read_text()
    }


RECIPE = ("memgen-gsm8k", *(f"--set={one}" for one in SETTINGS))


def train(
    folder: Path, *options: str, settings: tuple[str, ...] = (), ranks: int = 2
) -> list[dict[str, object]]:
    """Launch the script of `memgen-gsm8k`, as `grpo-run train` does once it has checked the recipe in another
    process; return the journal.
    """
    problems(folder)
    further = [f"--set={one}" for one in settings]
    module = ["-m", "grpo_run.trainers.recipes", *RECIPE, *further]
    run = Run(folder, ["--nproc-per-node", str(ranks), *options, *module]).start()
    return run.ended(timeout_seconds=200).events()


@pytest.mark.timeout(400)
def test_every_stage_of_a_recipe_ends_as_on_plain_ranks_although_the_trigger_was_killed(
    tmp_path: Path,
) -> None:
    """The weights are equal, and the evaluation, and what is loaded answers as the evaluation on two ranks
    did. Ranks end completions at different times, without a vote. `test_memgen_arithmetic.py` kills the other
    stages.
    """
    plain = tmp_path / "plain"
    problems(plain)
    plain_ranks(plain, [str(PACKAGED / "__main__.py"), *RECIPE], ranks=2)
    ours = tmp_path / "ours"
    journal = train(ours, "--inject", "kill@rank0:step5:phase=generate")
    assert [event["cause"] for event in journal if event["event"] == "incident"] == ["signal"]
    assert results(ours) == results(plain)
    assert steps_of_weaver(journal) == EPOCHS * PROBLEMS / (2 * ROWS)
    # imported here, or every worker of pytest would import torch
    from grpo_run.trainers.recipes import gsm8k

    asked = gsm8k.questions(read_problems(str(ours), "test"), chat=False)["prompt"]
    assert len(asked) == EVALUATED
    assert answered(ours / "out", asked) == evaluated(ours / "out")


def steps_of_weaver(journal: list[dict[str, object]]) -> int:
    """The last step of the first training."""
    steps = [one for one in journal if one["event"] == "step_logged" and one["train_call"] == 1]
    return max(int(str(one["step"])) for one in steps)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_epoch_is_an_epoch_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Each demonstration is seen twice."""
    journal = train(tmp_path, ranks=ranks, settings=("grpo.max_steps=2",))
    assert steps_of_weaver(journal) == EPOCHS * math.ceil(PROBLEMS / (ranks * ROWS))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_stage_runs_with_zero_2(tmp_path: Path) -> None:
    config = tmp_path / "zero2.json"
    config.write_text(json.dumps({
        "zero_optimization": {"stage": 2}, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }))  # fmt: skip
    settings = tuple(f"{stage}.deepspeed={config}" for stage in STAGES)
    journal = train(tmp_path / "ours", "--inject", "kill@rank1:step5", settings=settings)
    assert [event["cause"] for event in journal if event["event"] == "incident"] == ["signal"]
    assert len(results(tmp_path / "ours")) == 3
