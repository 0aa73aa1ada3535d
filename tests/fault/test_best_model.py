"""A run that keeps its best model ends with the same one, and with the same checkpoints, however often it is
killed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Run, Runs, digest

from grpo_run.runtime.checkpoints.search import SNAPSHOTS, name_of, snapshot_places

SCRIPT = str(SCRIPTS / "best_model.py")
EPOCHS = ("--max-steps", "-1", "--texts", "32", "--settings")
"""Two epochs of four steps on two ranks, evaluated and saved at the end of each."""
BY_EPOCH = {
    "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch",
}  # fmt: skip


def outcome(folder: Path, output: str) -> dict[str, Any]:
    """Return everything that a run must have in common with the undisturbed one."""
    return {
        "weights": digest(folder / output),
        "state": json.loads((folder / "state.json").read_text()),
        # the last step, if the script does not save it, is a snapshot, which other tools do not look at
        "output_dir": sorted(name for name in os.listdir(folder / output) if name != SNAPSHOTS),
    }


def compare(runs: Runs, tmp_path: Path, words: list[str], kills: list[int], *options: str) -> Run:
    """Train undisturbed and with kills after these steps; both must end the same. Return the killed run."""
    plain = tmp_path / "plain"
    plain.mkdir()
    plain_ranks(plain, [SCRIPT, "--output-dir", "out", *words], ranks=2)
    run = runs(
        "--nproc-per-node", "2", "--max-restarts", "40", "--snapshot-every", "1", *options, SCRIPT,
        "--output-dir", "out", *words, "--kill-after-steps", *map(str, kills),
    ).start().ended(timeout_seconds=500)  # fmt: skip
    recoveries = run.status()["recoveries"]
    assert len(recoveries) >= len(kills), run.tail()
    found, expected = outcome(tmp_path, "out"), outcome(plain, "out")
    for name, value in expected.items():
        assert found[name] == value, f"{name} differs:\n{run.tail()}"
    return run


def test_the_best_model_is_not_taken_from_a_snapshot(runs: Runs, tmp_path: Path) -> None:
    """The best step is 8; saved are 5, 10 and 12, so the undisturbed run keeps 5.

    After the first kill at 8 the snapshot is loaded from memory. The next attempt finishes no step, so the
    one after it loads the snapshot from disk.
    """
    words = ["--max-steps", "12", "--save-steps", "5"]
    run = compare(runs, tmp_path, words, [5, 8, 8])
    assert json.loads((tmp_path / "state.json").read_text())["best_model_checkpoint"] == "checkpoint-5"
    resumed = [record for record in run.events("resume_chosen") if record["step"] == 8]
    assert [record["in_memory"] for record in resumed] == [True, False], run.tail()
    snapshots, _ = snapshot_places(tmp_path / "out", resumed[-1]["run"], 1)
    assert tmp_path / resumed[-1]["path"] == snapshots / name_of(snapshots, 8)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "last", "options"),
    [
        pytest.param(["--max-steps", "12", "--save-steps", "5"], 12, [], id="best"),
        pytest.param(
            ["--max-steps", "12", "--save-steps", "5", "--save-total-limit", "1"], 12, [], id="rotated"
        ),
        pytest.param(["--max-steps", "12", "--save-steps", "1"], 12, [], id="every-step"),
        pytest.param(
            ["--max-steps", "12", "--save-steps", "4", "--best-at", "3", "--patience", "4"],
            7,
            [],
            id="stopped",
        ),
        pytest.param(
            ["--max-steps", "12", "--save-steps", "5"], 12, ["--snapshot-dir", "off"], id="no-memory"
        ),
        pytest.param([*EPOCHS, json.dumps(BY_EPOCH)], 8, [], id="epochs"),
        pytest.param([*EPOCHS, json.dumps({**BY_EPOCH, "save_strategy": "best"})], 8, [], id="saved-if-best"),
    ],
)
def test_kills_after_every_step_and_every_save(
    runs: Runs, tmp_path: Path, words: list[str], last: int, options: list[str]
) -> None:
    """Also right after the save of the last step, with which the script ends the call."""
    compare(runs, tmp_path, words, list(range(1, last + 1)), *options)
