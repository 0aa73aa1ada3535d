"""`grpo-run plan`: bad input, and the job that options and settings make. Nothing is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_run.cli.main import main
from grpo_run.cli.planning.options import build_parser, parse_size
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.sources import JobSource
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.upstream import versions

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
        (["--model", SHAPE + ",layers=3"], "layers is given twice"),
        (["--model", "type=nothing,layers=2,hidden=64,heads=4,vocabulary=100"], "nothing"),
        (["--model", SHAPE, "--beta", "nan"], "beta is nan"),
        (["--model", SHAPE, "--preset", "balanced", "--batch", "3"], "--batch"),
        (["--model", SHAPE, "--lora-targets", "q_proj"], "--lora-rank"),
        (["--model", SHAPE, "--algorithm", "sft", "--completion", "64"], "--length"),
        (["--model", SHAPE, "--algorithm", "sft", "--beta", "0.1"], "--beta is not for SFT"),
        (["--model", SHAPE, "--algorithm", "sft", "--length", "1"], "length is 1, expected 2"),
        (["--model", SHAPE, "--algorithm", "sft", "--preset", "balanced"], "--preset is not for SFT"),
        (["--model", SHAPE, "--length", "64"], "--length is for SFT"),
        (["--model", "layers=9,hidden=16777216,heads=4,vocabulary=16777216"], "parameters"),
        (["--model", SHAPE + ",positions=256"], "longest context"),
        (["--model", "x" * 5000], "up to 1024 characters"),
        (["--model", "layers=\u0663,hidden=64,heads=4,vocabulary=100"], "layers is"),
        (["--model", "layers=16777216,hidden=64,heads=4,vocabulary=100"], "from 1 to 2048"),
        (["--model", SHAPE, "--lora-rank", "-1"], "rank of LoRA is -1"),
        (["--model", SHAPE, "--vllm-share", "nan", "--gpu", "8GiB"], "between 0 and 1"),
        (["--model", SHAPE, "--num-generations", "0"], "generations are 1 or more"),
        ([], "needs --model"),
        (["missing.py"], "script missing.py does not exist"),
        (["no-such-recipe"], "unknown recipe"),
        (["no-such-recipe", "--", "--fast"], "takes no arguments"),
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
    "content",
    [
        "{",
        "[]",
        '{"hidden_size": 4}',
        '{"model_type": "qwen2", "hidden_size": -1}',
        '{"model_type": "qwen2", "num_attention_heads": 0}',
        '{"model_type": "qwen2", "max_position_embeddings": -1}',
        '{"model_type": "qwen2", "quantization_config": {"quant_method": "gptq", "bits": 4}}',
    ],
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


def _job(settings: dict[str, Any], *words: str, algorithm: str = "grpo") -> Job:
    source = JobSource(settings=settings, algorithm=algorithm)
    return job_of(build_parser().parse_args(["train.py", *words]), source)


def test_options_win_over_a_source_and_a_source_over_defaults() -> None:
    """A setting of None is TRL's default."""
    job = _job({"per_device_train_batch_size": 6, "max_completion_length": 99, "beta": 1}, "--batch", "3")
    assert (job.batch, job.completion, job.reference, job.autocast) == (3, 99, True, True)
    assert _job({"per_device_train_batch_size": None}).batch == 8


@pytest.mark.parametrize(
    ("preset", "rows", "group", "accumulation"),
    [("constrained", 4, 4, 32), ("balanced", 16, 8, 16), ("economical", 4, 4, 64)],
)
def test_a_preset_is_a_profile_in_rows(preset: str, rows: int, group: int, accumulation: int) -> None:
    """Prompts times completions are TRL's rows, whatever a source says; a rollout is one update's."""
    job = _job({"per_device_train_batch_size": 7, "num_generations": 7}, "--preset", preset)
    assert (job.batch, job.num_generations, job.accumulation) == (rows, group, accumulation)
    assert job.rollout_batches == accumulation


def test_both_names_of_checkpointing_are_read() -> None:
    """transformers renames `gradient_checkpointing`; TRL's default is on."""
    assert _job({}).checkpointing
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        assert not _job({name: False}).checkpointing


def test_rloo_scores_the_old_policy_and_keeps_a_reference_unless_told_otherwise() -> None:
    """TRL's defaults of the two trainers differ."""
    rloo = _job({"gradient_accumulation_steps": 2}, algorithm="rloo")
    assert (rloo.algorithm, rloo.rescored, rloo.reference) == ("rloo", True, True)
    grpo = _job({"gradient_accumulation_steps": 2})
    assert (grpo.algorithm, grpo.rescored, grpo.reference) == ("grpo", False, False)


def test_a_rollout_has_the_rows_that_a_source_says() -> None:
    """TRL divides `generation_batch_size` by the micro-batches of all ranks; without it, the accumulation
    decides.
    """
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert _job(settings).rollout_batches == 2
    said = {**settings, "generation_batch_size": 32}
    assert _job(said).rollout_batches == 8
    assert _job(said, "--ranks", "2").rollout_batches == 4
    assert _job(said, "--steps-per-generation", "3").rollout_batches == 3
    with pytest.raises(ConfigError, match="no multiple of the 12 rows"):
        _job(said, "--batch", "12")


def test_rows_of_sft_are_as_long_as_its_limit() -> None:
    """Nothing is generated."""
    job = _job({"max_length": 300, "per_device_train_batch_size": 2}, algorithm="sft")
    assert (job.algorithm, job.batch, job.prompt, job.completion) == ("sft", 2, 0, 300)
    assert (job.scored, job.generates, job.lengths) == (False, False, "300 tokens")
    assert _job({}, algorithm="sft").completion == 1024
    with pytest.raises(ConfigError, match="trains with GRPO, not with SFT"):
        _job({}, "--algorithm", "sft")


@pytest.mark.parametrize(
    ("algorithm", "settings", "expected"),
    [
        ("sft", {"packing": True}, "packing=True"),
        ("sft", {"padding_free": True}, "padding_free=True"),
        ("sft", {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ("sft", {"max_length": None}, "give --length"),
        ("sft", {"max_length": True}, "a whole number"),
        ("grpo", {"bf16": "yes"}, "True or False"),
        ("grpo", {"optim": "galore_adamw"}, "galore_adamw"),
        ("grpo", {"per_device_train_batch_size": "8"}, "a whole number"),
    ],
)
def test_what_is_not_covered_is_refused(algorithm: str, settings: dict[str, Any], expected: str) -> None:
    """A figure for another job would be wrong without a word."""
    with pytest.raises(ConfigError, match=expected):
        _job(settings, algorithm=algorithm)


def test_untested_versions_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `launch`; the plan is still made."""
    monkeypatch.setattr(versions, "TESTED", {"pytest": ("0.1", "0.1")})
    assert main(["plan"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert "not tested with pytest" in warning
    assert "needs --model" in error
