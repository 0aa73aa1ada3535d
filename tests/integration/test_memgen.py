"""MemGen on several ranks: loops that end at different times, and every stage of a recipe through kills."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support import warm
from support.journal import read_records
from support.references import plain_ranks
from support.runs import BIN, SCRIPTS, Runs

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
PROBLEMS = 24
SETTINGS = (
    "model=tiny", "data=problems.jsonl", "output_dir=out", "weaver.max_steps=4", "weaver.save_steps=2",
    "grpo.max_steps=6", "grpo.save_steps=2", "grpo.max_completion_length=12", "memgen.evaluation_problems=8",
    "memgen.evaluation_batch_size=4",
)  # fmt: skip


def problems(folder: Path) -> None:
    """Write problems in GSM8K's form, whose answers have delimiters."""
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "question": f"Tom has {n} apples and buys {n + 1}. How many?",
            "answer": f"{n}+{n + 1}.\n#### {2 * n + 1}",
        }
        for n in range(PROBLEMS)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(folder: Path) -> dict[str, str]:
    """Digests of what a recipe leaves: the adapters of both models, and the evaluation's lines."""
    out = folder / "out"
    files = [*(out / f"{name}-final" / "adapter_model.safetensors" for name in ("weaver", "trigger"))]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files} | {
        "evaluation": (out / "evaluation.jsonl").read_text()
    }


def train(folder: Path, *options: str, settings: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """Train `memgen-gsm8k` on two ranks; return the journal."""
    problems(folder)
    command = [
        str(BIN / "grpo-run"), "train", "memgen-gsm8k", "--nproc-per-node", "2", "--run-dir", "run",
        "--metrics-addr", "off", *options,
        *(word for one in (*SETTINGS, *settings) for word in ("--set", one)),
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=folder, timeout_seconds=200)
    assert code == 0, printed[-6000:]
    return list(read_records(folder / "run" / "journal.jsonl"))


@pytest.mark.timeout(400)
def test_every_stage_of_a_recipe_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The weaver's SFT and the trigger's GRPO end in the weights of plain ranks, and the evaluation in the
    same lines. Ranks end completions at different times, without a vote.
    """
    plain = tmp_path / "plain"
    problems(plain)
    words = [word for one in SETTINGS for word in ("--set", one)]
    plain_ranks(plain, [str(PACKAGED / "__main__.py"), "memgen-gsm8k", *words], ranks=2)
    ours = tmp_path / "ours"
    journal = train(
        ours, "--inject", "kill@rank1:step3", "--inject", "kill@rank0:step5",
        "--reward-workers", "0",
    )  # fmt: skip
    assert [event["cause"] for event in journal if event["event"] == "incident"] == ["signal"] * 2
    assert results(ours) == results(plain)


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
