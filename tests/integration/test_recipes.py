"""The packaged recipes: the demo as a user runs it, and GSM8K on its real files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support import warm
from support.runs import BIN, QUIET

from grpo_run.dashboards.reward_plot import Summary, draw_run
from grpo_run.runtime.history.journal import read_journal

GSM8K = Path(os.environ.get("GRPO_RUN_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))


def demo(folder: Path, *arguments: str) -> Summary:
    """Run the demo; it must recover its rank, and write the plot. Return what the plot says."""
    answer = subprocess.run(
        [str(BIN / "grpo-run"), "demo", "--out", "out", *arguments],
        cwd=folder, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    assert re.search(r"faults recovered +1 of 1", answer.stdout)
    picture = (folder / "out" / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    summary = draw_run(read_journal(folder / "out" / "run" / "journal.jsonl"), folder / "again.png")
    assert summary.compared_steps == 20
    assert summary.recoveries == 1
    return summary


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_short_demo_recovers_and_draws(tmp_path: Path) -> None:
    """The killed rank recovers and the plot is written, with fewer steps than `make demo` takes, which
    `.ci/run` runs.
    """
    demo(
        tmp_path, "--set", "sft.max_steps=30", "--set", "grpo.max_steps=42",
        "--set", "grpo.per_device_train_batch_size=16",
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_demo_learns(tmp_path: Path) -> None:
    """The reward rises by at least 0.3 to at least 0.8. `.ci/run` runs the demo too, which does not judge the
    reward.
    """
    summary = demo(tmp_path)
    assert summary.last_reward >= 0.8
    assert summary.last_reward - summary.first_reward >= 0.3


def test_gsm8k_trains_on_the_real_files(tmp_path: Path) -> None:
    """Two steps on GSM8K with the tiny model: prompts, answers and both rewards work together."""
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K files at {GSM8K}; set GRPO_RUN_GSM8K to their folder")
    command = [
        str(BIN / "grpo-run"), "train", "gsm8k", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"),
        "--metrics-addr", "off", "--set", "model=tiny", "--set", f"data={GSM8K}",
        "--set", f"output_dir={tmp_path / 'out'}", "--set", "grpo.max_steps=2", "--set", "grpo.save_steps=2",
        "--set", "grpo.max_completion_length=16", "--set", "grpo.num_generations=4",
        "--set", "grpo.per_device_train_batch_size=4", "--set", "grpo.gradient_accumulation_steps=1",
        "--set", "grpo.steps_per_generation=1", "--set", "grpo.bf16=false",
        "--set", "grpo.gradient_checkpointing=false",
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=tmp_path, timeout_seconds=240)
    assert code == 0, printed[-6000:]
    logged = [
        event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "step_logged"
    ]
    assert [event["step"] for event in logged] == [1, 2]
    assert all(event["reward"] is not None for event in logged)
    assert (tmp_path / "out").is_dir()
