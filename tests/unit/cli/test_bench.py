"""`grpo-run bench memory`: what it refuses, and what it writes of measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from grpo_run.cli import bench
from grpo_run.cli.bench import Measurement
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.trainers.rloo.switches import METHODS, ONLY_SCORES, ONLY_TEXT

MIB = 1 << 20
PEAKS = {METHODS["basic"]: 400, METHODS["string"]: 300, ONLY_SCORES: 301, ONLY_TEXT: 399}


def measurements(*, exhausted: bool = False) -> list[Measurement]:
    """Of `basic`, `string` and what is between them, with k = 2."""
    return [
        Measurement(
            switches=switches, k=2, peak_bytes=peak * MIB, peaks={"train": peak * MIB},
            series=[(0.0, 1, "start"), (1.0, peak * MIB, "train")],
            exhausted="no memory" if exhausted and switches == METHODS["basic"] else None,
        )
        for switches, peak in PEAKS.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["memory", "--methods", "other"], "no method 'other'"),
        (["memory", "--k", "1"], "expected numbers from 2 on"),
        (["memory", "--k", "two"], "expected numbers from 2 on"),
        ([], "experiment"),
    ],
)
def test_wrong_arguments_are_one_line(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        bench.main(words)


def test_table_pictures_and_measurements_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write_results(measurements(), ["basic", "string"], [2], tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert "| 2 | string (text, reduced, full) | 300 MiB | 0 | 0 | 300 | 0 | 25.0 % |" in table
    assert (
        "k = 2: `string` saves 100 MiB; reduced scores alone save 99 MiB, the string alone 1 MiB; the"
        " string adds 1 MiB to reduced scores."
    ) in table
    for name in ("peaks", "over-time", "savings"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "measurements.json").read_text())) == 4


def test_exhausted_memory_is_a_result(tmp_path: Path) -> None:
    """Without a saving on either side, and nothing to split."""
    bench.write_results(measurements(exhausted=True), ["basic", "string"], [2], tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| 2 | basic (interleaved, kept, full) | out of memory |" in table
    assert "| 2 | string (text, reduced, full) | 300 MiB | 0 | 0 | 300 | 0 |  |" in table
    assert "`string` saves" not in table


def test_a_run_that_fails_otherwise_ends_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its code and what it has printed. A shell stands in for Python, which would import TRL first."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho unrecognized arguments: $* >&2\nexit 2\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(
        ConfigError, match=r"(?s)failed with code 2: .*unrecognized arguments.*--no-such-option"
    ):
        bench.measure(METHODS["basic"], 2, ["--no-such-option"], tmp_path)


def test_a_setting_that_was_not_measured_leaves_nothing_to_split() -> None:
    assert len(list(bench.split_saving(measurements(), 2))) == 1
    assert list(bench.split_saving(measurements()[:3], 2)) == []
    assert list(bench.split_saving(measurements(), 4)) == []
