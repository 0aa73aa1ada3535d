"""Whatever is killed when, AsyncGRPO trains every prompt once, and completions as long as ever."""

from __future__ import annotations

import importlib.util
import json
import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.async_rollouts import server as stand_in
from support.async_rollouts.serving import serving
from support.kolmogorov_smirnov import critical, distance
from support.runs import SCRIPTS, Run, Runs

TRL = importlib.util.find_spec("trl")
if TRL is None or not (Path(str(TRL.origin)).parent / "experimental" / "async_grpo").is_dir():
    pytest.skip("TRL without it", allow_module_level=True)
GENERATIONS = 2
BATCH = 5
"""Rows of a rank in a step, so that a step ends inside a group."""
START_SECONDS = 180.0
"""Until an attempt has taken a step: its rank starts a process that imports everything, on two busy cores."""


@pytest.fixture
def url() -> Iterator[str]:
    """Start the server that answers without a model."""
    with serving() as address:
        yield address


def killed(
    runs: Runs, url: str, kills: int, prompts: int, *words: str, ranks: int = 1, victim: int = 0
) -> Run:
    """Run over some prompts, and kill a rank at random places."""
    run = runs(
        "--nproc-per-node", str(ranks), "--max-restarts", str(2 * kills), "--snapshot-every", "2",
        str(SCRIPTS / "async_prompts.py"), "--server", url, "--prompts", str(prompts), "--output-dir", "out",
        "--num-generations", str(GENERATIONS), "--per-device-train-batch-size", str(BATCH),
        "--save-steps", "1000", *words,
    ).start()  # fmt: skip
    chance, steps = random.Random(prompts), prompts * GENERATIONS // (BATCH * ranks)
    for kill in range(kills):
        reach = steps * (kill + 1) // (kills + 2) + chance.randrange(4)
        run.until_step(reach, timeout_seconds=START_SECONDS + steps)
        time.sleep(chance.uniform(0.0, 0.2))  # random, not guessed: any place will do
        run.kill(victim)
        run.until_event("incident", count=kill + 1)
    return run.ended(timeout_seconds=START_SECONDS + 2 * steps)


def trained_once(run: Run, prompts: int, ranks: int = 1) -> list[int]:
    """Check that every prompt was trained once, but for those in flight at the end; return the lengths."""
    file = run.folder / "ledger.jsonl"
    run.command("ledger", "--output", str(file))
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    trained = [one for one in lines if one["state"] in ("trained", "trained_again")]
    assert {one["state"] for one in lines} <= {"trained", "trained_again", "open"}, lines
    assert len({(one["epoch"], one["prompt"]) for one in trained}) == len(trained)
    assert sum(len(one["lengths"]) != GENERATIONS for one in trained) <= 1, trained
    steps, batch = run.events("step_committed")[-1]["step"], BATCH * ranks
    assert sum(len(one["lengths"]) for one in trained) == steps * batch
    # TRL ends where its collator, one micro-batch ahead, has had a row of so many prompts
    assert (steps + 1) * batch > (prompts - 1) * GENERATIONS >= steps * batch
    size = sum(one.stat().st_size for one in (run.directory / "ledger").iterdir())
    assert size / len(trained) < 100, size
    return [length for one in trained for length in one["lengths"]]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["data set", "stream"])
def test_a_kill_costs_no_prompt_and_repeats_none(runs: Runs, url: str, kind: str) -> None:
    """Also of data that TRL would begin anew. Some of what the rank had taken ahead is drawn again."""
    words = ("--stream", "--max-steps", "23") if kind == "stream" else ("--max-steps", "-1")
    run = killed(runs, url, 1, 60, *words)
    trained_once(run, 60)
    assert "trained after they were repeated for a fault" in run.command("report", "--format", "md")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_in_two_ranks_costs_no_prompt_and_repeats_none(runs: Runs, url: str, victim: int) -> None:
    """Whether it meets the rank that takes the rows, or one that gets its own from it."""
    run = killed(runs, url, 1, 60, "--max-steps", "-1", ranks=2, victim=victim)
    assert len(run.status()["recoveries"]) == 1
    trained_once(run, 60, ranks=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_five_kills_do_not_bias_the_lengths(runs: Runs, url: str) -> None:
    """Long completions are late, so they are in flight more often when the rank is killed."""
    run = killed(runs, url, 5, 2000, "--max-steps", "-1")
    lengths = trained_once(run, 2000)
    with urllib.request.urlopen(url, timeout=30) as answer:
        asked = json.load(answer)["asked"]
    usual = [stand_in.length(prompt, number) for prompt in asked for number in range(GENERATIONS)]
    found, limit = distance(lengths, usual), critical(len(asked), len(asked))
    print(f"{len(lengths)} rows of 2,000 prompts: distance {found:.4f}, limit {limit:.4f}")
    assert found < limit
    # what the test would say if one in ten were lost, the longest first
    assert distance(sorted(lengths)[: len(lengths) * 9 // 10], usual) > limit
