"""`grpo-run plan`: bad input, and what scripts and recipes say. Nothing is traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.cli.planning.options import build_parser, parse_size
from grpo_run.cli.planning.plan import job_of
from grpo_run.cli.planning.sources import read_source

SHAPE = "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "no/such-model", "--batch", "4"], "neither a folder"),
        (["--model", "./missing", "--batch", "4"], "does not exist"),
        (["--model", SHAPE, "--batch", "0"], "batch is 0"),
        (["--model", SHAPE, "--batch", "4", "--completion", "99999999"], "completion is 99999999"),
        (["--model", SHAPE, "--batch", "4", "--gpu", "80"], "give a unit"),
        (["--model", SHAPE, "--batch", "4", "--gpu", "0GiB"], "expected a size"),
        (["--model", "layers=2,hidden=65,heads=4,vocabulary=100"], "not a multiple"),
        (["--model", "type=nothing,layers=2,hidden=64,heads=4,vocabulary=100"], "nothing"),
        ([], "needs --model"),
        (["missing.py"], "cannot read"),
        (["no-such-recipe"], "unknown recipe"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced and nothing is printed to standard output."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert expected in output.err
    assert len(output.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"hidden_size": 4}', '{"model_type": "qwen2", "hidden_size": -1}']
)
def test_an_unreadable_configuration_is_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file."""
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--batch", "4"]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert len(error.strip().splitlines()) == 1


def test_sizes_are_decimal_or_binary() -> None:
    """GB is 10^9 bytes, GiB 2^30."""
    assert parse_size("--gpu", "22.65GB") == 22_650_000_000
    assert parse_size("--gpu", "80 GiB") == 80 << 30


def test_options_win_over_a_script_and_a_script_over_defaults(tmp_path: Path) -> None:
    """Only literals of a script are read, and it is not executed."""
    script = tmp_path / "train.py"
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer\nraise SystemExit(3)\n"
        "args = GRPOConfig(per_device_train_batch_size=6, max_completion_length=99, beta=0.1, bf16=unknown)\n"
        "GRPOTrainer(model='some/model', args=args)\n"
    )
    settings = read_source(str(script))
    assert settings["model"] == "some/model"
    job = job_of(build_parser().parse_args(["--batch", "3"]), settings)
    assert (job.batch, job.completion, job.reference, job.autocast) == (3, 99, True, True)


def test_an_explanation_needs_a_size_with_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """As `--gpu` does."""
    assert main(["plan", "--model", SHAPE, "--batch", "4", "--explain", "22.65"]) == 2
    assert "give a unit" in capsys.readouterr().err
