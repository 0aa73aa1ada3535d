"""A YAML file of TRL's own scripts is a job too. Nothing is traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.cli.planning.options import build_parser
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.sources import JobSource, read_file
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.job import Job

BASE = "model_name_or_path: some/model\ndataset_name: some/data\n"


def _source(tmp_path: Path, text: str, algorithm: str | None = None) -> JobSource:
    path = tmp_path / "job.yaml"
    path.write_text(BASE + text)
    return read_file(str(path), algorithm)


def _job(tmp_path: Path, text: str, *words: str) -> Job:
    options = build_parser().parse_args([str(tmp_path / "job.yaml"), *words])
    return job_of(options, _source(tmp_path, text, options.algorithm))


def test_the_keys_of_trl_are_those_of_a_job(tmp_path: Path) -> None:
    """Those of the trainer's configuration and of the model's, and numbers that YAML takes for texts."""
    text = (
        "per_device_train_batch_size: 4\nmax_completion_length: '64'\nbf16: false\nbeta: 4e-2\n"
        "attn_implementation: eager\ndtype: bfloat16\nenv:\n  SOME: thing\n"
    )
    job = _job(tmp_path, text)
    assert (job.algorithm, job.batch, job.completion, job.autocast) == ("grpo", 4, 64, False)
    assert (job.reference, job.attention, job.weights, job.lora_rank) == (True, "eager", "bfloat16", 0)
    assert _source(tmp_path, text).settings["model"] == "some/model"
    assert _job(tmp_path, text, "--batch", "3").batch == 3
    assert _job(tmp_path, 'model_init_kwargs: {"dtype": "float16"}\n').weights == "float16"


def test_adapters_have_the_defaults_of_trls_model_settings(tmp_path: Path) -> None:
    """They are not those of peft; without `use_peft` all weights are trained, and a note says so."""
    job = _job(tmp_path, "use_peft: true\n")
    assert (job.lora_rank, job.lora_targets, job.lora_dropout) == (16, (), 0.05)
    said = "use_peft: true\nlora_r: 8\nlora_dropout: 0\nlora_target_modules: [q_proj, v_proj]\n"
    job = _job(tmp_path, said)
    assert (job.lora_rank, job.lora_targets, job.lora_dropout) == (8, ("q_proj", "v_proj"), 0.0)
    unused = _source(tmp_path, "lora_r: 8\n")
    assert unused.lora_rank == 0
    assert any("all weights are trained" in note for note in unused.notes)


def test_a_file_is_for_grpo_unless_it_or_an_option_says_otherwise(tmp_path: Path) -> None:
    """A key that only SFT has says it, and a note tells as what the file is read."""
    assert _job(tmp_path, "", "--algorithm", "rloo").algorithm == "rloo"
    assert _job(tmp_path, "", "--algorithm", "sft").algorithm == "sft"
    sft = _source(tmp_path, "max_length: 300\n")
    assert sft.algorithm == "sft"
    assert any("for SFT, since it sets max_length" in note for note in sft.notes)
    assert any("for GRPO (--algorithm" in note for note in _source(tmp_path, "").notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("load_in_4bit: true\n", "load_in_4bit: quantized weights"),
        ("model_init_kwargs:\n  load_in_8bit: true\n", "quantized weights"),
        ("use_peft: true\nuse_dora: true\n", "use_dora is not covered"),
        ("use_peft: true\nlora_r: big\n", "lora_r = 'big'"),
        ("use_peft: 3\n", "use_peft = 3"),
        ("use_peft: true\nlora_dropout: 1\n", "lora_dropout = 1"),
        ("use_peft: true\nlora_target_modules: 3\n", "lora_target_modules"),
        ("per_device_train_batch_size: many\n", "per_device_train_batch_size is 'many'"),
        ("model_init_kwargs: '{'\n", "no JSON"),
        ("packing: true\n", "packing=True"),
    ],
)
def test_what_is_not_covered_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """As it is in a script."""
    with pytest.raises(ConfigError, match=expected):
        _job(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_generations: 4\nper_device_train_batch_size: 4\n", "plan needs --model"),
        ("compute_environment: LOCAL_MACHINE\n", "plan needs --model"),
        ("grpo:\n  max_steps: 3\n", "the key 'task' is missing"),
        ("- a\n", "expected a mapping"),
    ],
)
def test_a_file_that_is_no_job_is_one_line(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what the file is not, or what to give."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1
