"""`grpo-run plan`: bad input, and what scripts and recipes say. Nothing is traced."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from grpo_run.cli.main import main
from grpo_run.cli.planning.options import build_parser, parse_size
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.source import JobSource
from grpo_run.cli.planning.sources import read_source
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
        (["--model", SHAPE, "--preset", "balanced"], "needs --gpu"),
        (["--model", SHAPE, "--preset", "balanced", "--gpu", "8GiB", "--batch", "3"], "--batch"),
        (["--model", SHAPE, "--plot", "plan.png"], "ends in .svg"),
        (["--model", SHAPE, "--lora-targets", "q_proj"], "--lora-rank"),
        (["--model", SHAPE, "--algorithm", "sft", "--completion", "64"], "--length"),
        (["--model", SHAPE, "--algorithm", "sft", "--beta", "0.1"], "--beta is not for SFT"),
        (["--model", SHAPE, "--algorithm", "sft", "--length", "1"], "length is 1, expected 2"),
        (
            ["--model", SHAPE, "--algorithm", "sft", "--preset", "balanced", "--gpu", "8GiB"],
            "SFT generates none",
        ),
        (["--model", SHAPE, "--length", "64"], "--length is for SFT"),
        (["--model", "layers=9,hidden=16777216,heads=4,vocabulary=16777216"], "parameters"),
        (["--model", SHAPE + ",positions=256"], "longest context"),
        (["--model", SHAPE, "--pad-to", "512"], "--pad-to is for --explain"),
        (["--model", SHAPE, "--explain", "1GB", "--pad-to", "512"], "rows have 256 + 512 tokens already"),
        (["--model", "x" * 5000], "up to 1024 characters"),
        (["--model", "layers=\u0663,hidden=64,heads=4,vocabulary=100"], "layers is"),
        (["--model", "layers=16777216,hidden=64,heads=4,vocabulary=100"], "from 1 to 2048"),
        (["--model", SHAPE, "--lora-rank", "-1"], "rank of LoRA is -1"),
        (["--model", SHAPE, "--vllm-share", "nan", "--gpu", "8GiB"], "between 0 and 1"),
        (["--model", SHAPE, "--explain", "1GB", "--pad-to", "0"], "--pad-to is 0"),
        (["--model", SHAPE, "--steps", "3"], "--steps is for --explain"),
        (["--model", SHAPE, "--explain", "1GB", "--steps", "24..12"], "a range such as 12..24"),
        (["--model", SHAPE, "--num-generations", "0"], "generations are 1 or more"),
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


def _source(tmp_path: Path, text: str) -> JobSource:
    script = tmp_path / "train.py"
    script.write_text(text)
    return read_source(str(script))


def _job(tmp_path: Path, text: str, *words: str) -> Job:
    return job_of(build_parser().parse_args(list(words)), _source(tmp_path, text))


def test_options_win_over_a_script_and_a_script_over_defaults(tmp_path: Path) -> None:
    """Literals and names of literals are read, and nothing is executed."""
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nLENGTH = 99\nraise SystemExit(3)\n"
        "args = GRPOConfig(per_device_train_batch_size=6, max_completion_length=LENGTH, beta=1, bf16=unknown)\n"
        "GRPOTrainer(model='some/model', args=args)\n"
    )
    source = _source(tmp_path, text)
    assert source.settings["model"] == "some/model"
    assert any("bf16" in note for note in source.notes)
    job = _job(tmp_path, text, "--batch", "3")
    assert (job.batch, job.completion, job.reference, job.autocast) == (3, 99, True, True)


def test_a_loaded_model_keeps_the_type_of_its_saved_weights(tmp_path: Path) -> None:
    """`from_pretrained` of transformers does, unless it is told another; TRL loads a name in float32."""
    text = (
        "model = AutoModelForCausalLM.from_pretrained('some/model'{})\n"
        "GRPOTrainer(model=model, args=GRPOConfig())\n"
    )
    assert _source(tmp_path, text.format("")).settings["dtype"] == "auto"
    said = _source(tmp_path, text.format(", dtype=torch.float16")).settings
    assert (said["model"], said["dtype"]) == ("some/model", "float16")
    assert _job(tmp_path, "GRPOTrainer(model='some/model')").weights == "float32"


def test_both_names_of_checkpointing_are_read(tmp_path: Path) -> None:
    """transformers renames `gradient_checkpointing`; TRL's default is on."""
    text = "GRPOTrainer(model='m', args=GRPOConfig({}))"
    assert _job(tmp_path, text.format("")).checkpointing
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        assert not _job(tmp_path, text.format(f"{name}=False")).checkpointing


def test_rloo_scores_the_old_policy_and_keeps_a_reference_unless_told_otherwise(tmp_path: Path) -> None:
    """TRL's defaults of the two trainers differ."""
    rloo = _job(tmp_path, "RLOOTrainer(model='m', args=RLOOConfig(gradient_accumulation_steps=2))")
    assert (rloo.algorithm, rloo.rescored, rloo.reference) == ("rloo", True, True)
    grpo = _job(tmp_path, "GRPOTrainer(model='m', args=GRPOConfig(gradient_accumulation_steps=2))")
    assert (grpo.algorithm, grpo.rescored, grpo.reference) == ("grpo", False, False)


def test_a_rollout_has_the_rows_that_a_script_says(tmp_path: Path) -> None:
    """TRL divides `generation_batch_size` by the micro-batches of all ranks; without it, the accumulation decides."""
    text = "GRPOTrainer(model='m', args=GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2{}))"
    assert _job(tmp_path, text.format("")).rollout_batches == 2
    said = text.format(", generation_batch_size=32")
    assert _job(tmp_path, said).rollout_batches == 8
    assert _job(tmp_path, said, "--ranks", "2").rollout_batches == 4
    assert _job(tmp_path, said, "--steps-per-generation", "3").rollout_batches == 3
    with pytest.raises(ConfigError, match="no multiple of the 12 rows"):
        _job(tmp_path, said, "--batch", "12")


def test_rows_of_sft_are_as_long_as_its_limit(tmp_path: Path) -> None:
    """A script with several trainers is read for the one that is wanted; nothing is generated."""
    text = (
        "SFTTrainer(model='m', args=SFTConfig(max_length=300, per_device_train_batch_size=2))\n"
        "GRPOTrainer(model='n', args=GRPOConfig(per_device_train_batch_size=4, beta=0.1))\n"
    )
    script = tmp_path / "train.py"
    script.write_text(text)
    job = job_of(build_parser().parse_args([str(script)]), read_source(str(script), "sft"))
    assert (job.algorithm, job.batch, job.prompt, job.completion) == ("sft", 2, 0, 300)
    assert (job.scored, job.generates, job.lengths) == (False, False, "300 tokens")
    assert _job(tmp_path, text).batch == 4
    assert _job(tmp_path, "SFTTrainer(model='m')").completion == 1024
    with pytest.raises(ConfigError, match="trains with GRPO, not with SFT"):
        _job(tmp_path, "GRPOTrainer(model='m')", str(script), "--algorithm", "sft")


def test_adapters_of_a_script_are_read(tmp_path: Path) -> None:
    """Written out where they are used, or under a name; what cannot be read is said."""
    text = "config = LoraConfig(r=32, lora_dropout=0.1, target_modules=['q_proj', 'v_proj'])\nGRPOTrainer(model='m', peft_config=config)\n"
    job = _job(tmp_path, text)
    assert (job.lora_rank, job.lora_targets, job.lora_dropout) == (32, ("q_proj", "v_proj"), 0.1)
    assert _job(tmp_path, text, "--lora-rank", "0").lora_rank == 0
    unread = _source(tmp_path, "GRPOTrainer(model='m', peft_config=get_peft_config(model_args))")
    assert unread.lora_rank == 0
    assert any("--lora-rank" in note for note in unread.notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "DPOTrainer(model='m')",
            "trains with DPOTrainer; plan predicts GRPOTrainer, RLOOTrainer, SFTTrainer",
        ),
        ("print('no trainer')", "calls no trainer of TRL"),
        ("SFTTrainer(model='m', args=SFTConfig(packing=True))", "packing=True"),
        ("SFTTrainer(model='m', args=SFTConfig(padding_free=True))", "padding_free=True"),
        ("SFTTrainer(model='m', args=SFTConfig(label_smoothing_factor=0.1))", "label_smoothing_factor=0.1"),
        ("SFTTrainer(model='m', args=SFTConfig(max_length=None))", "give --length"),
        ("SFTTrainer(model='m', compute_loss_func=mine)", "compute_loss_func"),
        ("GRPOTrainer(model='m', peft_config=LoraConfig(bias='all'))", "bias"),
        ("GRPOTrainer(model='m', peft_config=LoraConfig(r='x'))", "a whole number"),
        ("GRPOTrainer(model='m', args=GRPOConfig(bf16='yes'))", "True or False"),
        ("SFTTrainer(model='m', args=SFTConfig(max_length=True))", "a whole number"),
        ("GRPOTrainer(model='m')\nRLOOTrainer(model='m')", "both GRPO and RLOO"),
        ("GRPOTrainer(model='m', quantization_config=BitsAndBytesConfig(load_in_4bit=True))", "quantized"),
        ("q = GPTQConfig(bits=4)\nGRPOTrainer(model='m', quantization_config=q)", "quantized"),
        ("GRPOTrainer(model='m', args=GRPOConfig(model_init_kwargs={'load_in_8bit': True}))", "quantized"),
        ("m = AutoModelForImageTextToText.from_pretrained('m')\nGRPOTrainer(model=m)", "images"),
        ("GRPOTrainer(model='m', peft_config=LoraConfig(use_dora=True))", "use_dora"),
        ("GRPOTrainer(model='m', args=GRPOConfig(optim='galore_adamw'))", "galore_adamw"),
        ("GRPOTrainer(model='m', args=GRPOConfig(per_device_train_batch_size='8'))", "a whole number"),
    ],
)
def test_what_is_not_covered_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """A figure for another job would be wrong without a word."""
    with pytest.raises(ConfigError, match=expected):
        _job(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "class Mine(GRPOConfig):\n    per_device_train_batch_size: int = 3\nGRPOTrainer('m', args=Mine())",
        "class Mine(GRPOConfig):\n    per_device_train_batch_size: int = field(default=3)\nGRPOTrainer('m', args=Mine('o'))",
        "class A(GRPOConfig):\n    per_device_train_batch_size: int = 3\nclass B(A): pass\nGRPOTrainer('m', args=B())",
        "class A(GRPOConfig):\n    per_device_train_batch_size: int = 9\nGRPOTrainer('m', args=A(per_device_train_batch_size=3))",
        "Config = GRPOConfig\nGRPOTrainer('m', args=Config(per_device_train_batch_size=3))",
        "Config, Trainer = trl.GRPOConfig, trl.GRPOTrainer\nTrainer('m', args=Config(per_device_train_batch_size=3))",
    ],
)
def test_defaults_of_subclasses_and_other_names_of_classes_are_read(text: str, tmp_path: Path) -> None:
    """A class of the script has the defaults that it writes out, unless its call says otherwise."""
    job = _job(tmp_path, text)
    assert job.batch == 3
    assert job.algorithm == "grpo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GRPOTrainer(model='m', args=GRPOConfig(use_liger_kernel=True))", "upper bound"),
        (
            "SFTTrainer(model='m')\nGRPOTrainer(model='m', args=GRPOConfig())",
            r"SFTTrainer, which the script uses too (--algorithm sft predicts it)",
        ),
        ("GRPOTrainer(model='m', args=GRPOConfig(**settings))", "not read"),
        ("GRPOTrainer(model='m', args=GRPOConfig(deepspeed='zero3.json'))", "--layout"),
        ("GRPOTrainer(model='m', args=args)", "writes out no configuration"),
        (
            "q = get_quantization_config(model_args)\nGRPOTrainer(model='m', quantization_config=q)",
            "is taken to return None",
        ),
        (
            "c = GRPOConfig()\ndef tune(a): a.bf16 = False\ntune(c)\nGRPOTrainer(model='m', args=c)",
            "Set again",
        ),
        ("c = GRPOConfig()\nsetattr(c, 'bf16', False)\nGRPOTrainer(model='m', args=c)", "Set again"),
        ("c = GRPOConfig()\nfor k in ks: setattr(c, k, 1)\nGRPOTrainer(model='m', args=c)", "computed names"),
        ("c = replace(GRPOConfig(), bf16=False)\nGRPOTrainer(model='m', args=c)", "Set again"),
        ("c = GRPOConfig()\nd = replace(c, bf16=False)\nGRPOTrainer(model='m', args=d)", "Set again"),
        ("t = GRPOTrainer(model='m', args=GRPOConfig())\nt.args.bf16 = False", "Set again"),
        (
            "class T(GRPOTrainer):\n    def compute_loss(self): pass\nT(model='m')",
            "T has its own compute_loss",
        ),
        ("GRPOTrainer(model='m', optimizers=(mine, None))", "optimizers is not followed"),
        (
            "class A(B): pass\nclass B(A): pass\nA()\nGRPOTrainer(model='m', args=args)",
            "writes out no configuration",
        ),
        ("for p in m.parameters(): p.requires_grad = False\nGRPOTrainer(model='m')", "requires_grad"),
    ],
)
def test_what_is_not_followed_is_said(text: str, expected: str, tmp_path: Path) -> None:
    """The prediction is printed, with a note."""
    assert any(expected in note for note in _source(tmp_path, text).notes)


def test_an_explanation_needs_a_size_with_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """As `--gpu` does."""
    assert main(["plan", "--model", SHAPE, "--batch", "4", "--explain", "22.65"]) == 2
    assert "give a unit" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_is_not_called_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script names one, by an expression."""
    script = tmp_path / "train.py"
    script.write_text("GRPOTrainer(model=options.model, args=GRPOConfig())\n")
    assert main(["plan", str(script)]) == 2
    assert "the model cannot be read from the script" in capsys.readouterr().err


def test_untested_versions_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `launch`; `--allow-untested` accepts them."""
    monkeypatch.setattr(versions, "tested_versions", lambda: {"trl": SpecifierSet("<0.1")})
    assert main(["plan"]) == 2
    error = capsys.readouterr().err
    assert "outside the tested range" in error
    assert len(error.splitlines()) == 1
    assert main(["plan", "--allow-untested"]) == 2
    assert "needs --model" in capsys.readouterr().err
