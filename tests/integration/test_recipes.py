"""The packaged recipes: the demo as a user runs it, and GSM8K on its real files."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support import warm
from support.journal import read_records
from support.runs import BIN, QUIET

GSM8K = Path(os.environ.get("GRPO_RUN_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_demo_learns(tmp_path: Path) -> None:
    """It recovers its rank and writes its report, and the reward rises by at least 0.3 to at least 0.8.
    `.ci/run` runs the demo too, which does not judge the reward.
    """
    answer = subprocess.run(
        [str(BIN / "grpo-run"), "demo", "--out", "out"],
        cwd=tmp_path, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    assert re.search(r"faults recovered +1 of 1", answer.stdout)
    found = re.findall(r"reward, (?:first|last) 20 steps +([0-9.]+)", answer.stdout)
    first, last = map(float, found)
    assert last >= 0.8
    assert last - first >= 0.3
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Finished at step 120 of 120, 1 fault recovered." in page


def train_gsm8k(folder: Path, *settings: str, inject: str, seconds: float) -> list[dict[str, Any]]:
    """Train the tiny model on the real files with two ranks; one fault must be recovered. Return what GRPO's
    steps have logged.
    """
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K files at {GSM8K}; set GRPO_RUN_GSM8K to their folder")
    command = [
        str(BIN / "grpo-run"), "train", "gsm8k", "--nproc-per-node", "2", "--run-dir", str(folder / "run"),
        "--metrics-addr", "off", "--inject", inject, "--set", "model=tiny", "--set", f"data={GSM8K}",
        "--set", f"output_dir={folder / 'out'}", *(word for one in settings for word in ("--set", one)),
    ]  # fmt: skip
    code, printed = warm.run(command, cwd=folder, timeout_seconds=seconds)
    assert code == 0, printed[-6000:]
    assert "1 fault recovered" in printed
    logged = {
        event["step"]: event
        for event in read_records(folder / "run" / "journal.jsonl")
        if event["event"] == "step_logged" and event["train_call"] == 2
    }
    assert list(logged) == sorted(logged)
    return list(logged.values())


@pytest.mark.full
def test_gsm8k_trains_on_the_real_files(tmp_path: Path) -> None:
    """A warm start and four steps, one of them repeated: prompts, answers and both rewards work together."""
    logged = train_gsm8k(
        tmp_path, "sft.max_steps=2", "sft.per_device_train_batch_size=4", "sft.logging_steps=1",
        "grpo.max_steps=4", "grpo.per_device_train_batch_size=8", "grpo.max_completion_length=16",
        "grpo.save_steps=2", inject="kill@rank1:step3", seconds=120,
    )  # fmt: skip
    assert [event["step"] for event in logged] == [1, 2, 3, 4]
    assert all(event["reward_functions"].keys() == {"correct_answer", "answer_format"} for event in logged)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_tiny_model_learns_the_format_of_gsm8k(tmp_path: Path) -> None:
    """From at most 0.2 to above 0.8 in 200 steps, with a rank killed on the way, in ten minutes."""
    started = time.monotonic()
    logged = train_gsm8k(tmp_path, inject="kill@rank1:step117", seconds=600)
    assert time.monotonic() - started < 600
    found = [event["reward_functions"]["answer_format"]["mean"] for event in logged]
    assert len(found) == 200
    assert 0.05 <= mean(found[:10]) <= 0.2
    assert mean(found[-20:]) > 0.8
