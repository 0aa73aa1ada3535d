"""The RLOO memory experiment under a limit on live bytes: `basic` at k = 8 dies unsupervised, and finishes
supervised in the weights of an undisturbed run.

All runs replay the completions that the first one has recorded, so generation is the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.memory_plans import HALVED, plans_of
from support.references import plain_ranks
from support.runs import Run, Runs
from support.weights import relative_difference

from grpo_run.trainers import rloo

SCRIPT = Path(rloo.__file__).parent / "__main__.py"
BELOW_BASIC_BYTES = 300_000
"""How far the limit is below the peak of `basic`; that of `string` is 786,432 bytes of scores lower."""
ROUNDING = 1e-7


def words(tmp_path: Path, method: str, name: str, *more: str) -> Sequence[str]:
    """The script and its arguments."""
    return (
        str(SCRIPT), "--k=8", "--vocabulary=4096", "--completion-tokens=3", f"--method={method}",
        f"--completions={tmp_path / 'completions'}", f"--output-dir={tmp_path / name}", *more,
    )  # fmt: skip


def undisturbed(tmp_path: Path) -> Path:
    """Train `basic` without a limit or a launcher, record its completions, and return its folder."""
    plain_ranks(tmp_path, words(tmp_path, "basic", "reference"), ranks=1)
    return tmp_path / "reference"


def limit(tmp_path: Path) -> str:
    """Return the argument that limits live bytes, by the peak of the undisturbed run."""
    peak = json.loads((tmp_path / "reference" / "memory.json").read_text())["peak_bytes"]
    return f"--limit-bytes={peak - BELOW_BASIC_BYTES}"


def supervised(runs: Runs, tmp_path: Path, method: str) -> Run:
    """Train a method under grpo-run and the limit."""
    limited = words(tmp_path, method, method, limit(tmp_path))
    return runs("--nproc-per-node", "1", *limited, name=f"run-{method}").start().ended()


def check_weights(tmp_path: Path, method: str) -> None:
    """Hold that a run has the weights of the undisturbed one but for rounding."""
    found = relative_difference(tmp_path / method, tmp_path / "reference", "model.safetensors")
    assert found <= ROUNDING


def test_basic_dies_unsupervised_and_finishes_supervised_in_the_same_weights_and_string_needs_no_change(
    runs: Runs, tmp_path: Path
) -> None:
    """Both under one limit, with the completions of one undisturbed run."""
    undisturbed(tmp_path)
    with pytest.raises(AssertionError, match="OutOfMemoryError: The limit on live tensors is reached"):
        plain_ranks(tmp_path, words(tmp_path, "basic", "dead", limit(tmp_path)), ranks=1)
    assert not (tmp_path / "dead" / "model.safetensors").exists()
    run = supervised(runs, tmp_path, "basic")
    (verdict,) = run.verdicts()
    assert verdict["cause"] == "gpu_oom", verdict["sentence"]
    assert plans_of(run) == [HALVED], run.tail()
    check_weights(tmp_path, "basic")
    assert supervised(runs, tmp_path, "string").verdicts() == []
    check_weights(tmp_path, "string")


@pytest.mark.full
@pytest.mark.parametrize("method", ["lazy", "repeat_sampler"])
def test_the_methods_that_keep_scores_finish_supervised_too(runs: Runs, tmp_path: Path, method: str) -> None:
    undisturbed(tmp_path)
    assert plans_of(supervised(runs, tmp_path, method)) == [HALVED]
    check_weights(tmp_path, method)
