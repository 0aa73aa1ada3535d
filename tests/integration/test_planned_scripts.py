"""`grpo-run plan SCRIPT` with scripts of TRL, which run until their first `train()` without weights."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import warm

from grpo_run.cli import plan
from grpo_run.cli.main import main
from grpo_run.cli.planning import _script_process, requested_job
from grpo_run.cli.planning import script as reading
from grpo_run.cli.planning.script import read_script
from grpo_run.runtime.errors import ConfigError

WORDS = {"a": 0, "<unk>": 1, "<eos>": 2, "<pad>": 3}
GRPO = """
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig("out", max_completion_length=99, beta=0.1, num_generations=2, bf16=True,
    use_vllm=True, vllm_mode=sys.argv[2], gradient_accumulation_steps=2)
args.gradient_accumulation_steps = 3
trainer = GRPOTrainer(sys.argv[1], args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
    train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}))
try:
    trainer.train()
except BaseException:
    pass
open("trained", "w")
"""
LORA = """
import sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="flash_attention_2").cuda()
assert all(one.is_meta for one in model.parameters())
SFTTrainer(model.to("cuda", torch.bfloat16), args=SFTConfig("out", max_length=77, report_to="none"),
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
    train_dataset=Dataset.from_dict({"text": ["a a"] * 8}), peft_config=LoraConfig(r=4)).train()
"""


@pytest.fixture
def warm_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read scripts in forks of the warm launcher. Two tests start an interpreter, as the command does."""

    def start(command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> warm.Process:
        program = [*command[:2], _script_process.__file__, *command[4:]]
        return warm.start(program, cwd=Path.cwd(), environment=env, stdout=stdout, cold=False)

    monkeypatch.setattr(reading, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a folder with a configuration and a tokenizer, and without weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    folder = str(tmp_path / "model")
    Qwen2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(WORDS, unk_token="<unk>")),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return folder


def _script(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("mode", ["colocate", pytest.param("server", marks=pytest.mark.full)])
def test_a_job_on_several_ranks_with_vllm_needs_neither(
    mode: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script sets after its configuration is built counts; nothing after `train()` runs."""
    source = read_script(_script(tmp_path, GRPO, monkeypatch), [model, mode], ranks=4)
    assert (source.algorithm, source.lora_rank) == ("grpo", 0)
    expected = {
        "max_completion_length": 99, "beta": 0.1, "bf16": True, "vllm_mode": mode, "dtype": "float32",
        "gradient_accumulation_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 8,
    }  # fmt: skip
    assert {name: source.settings[name] for name in expected} == expected
    assert source.configuration is not None
    assert source.configuration["hidden_size"] == 64
    assert not (tmp_path / "trained").exists()


@pytest.mark.usefixtures("warm_process")
def test_a_loaded_model_with_adapters_is_built_without_its_weights(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no weights, no GPU, and no flash attention."""
    pytest.importorskip("peft")
    source = read_script(_script(tmp_path, LORA, monkeypatch), [model])
    assert (source.algorithm, source.lora_rank, source.settings["dtype"]) == ("sft", 4, "bfloat16")
    assert (source.lora_targets, source.settings["attention"]) == (("q_proj", "v_proj"), "sdpa")


@pytest.mark.usefixtures("warm_process")
def test_a_file_of_trl_is_planned_by_its_own_script(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the keys of all its configurations, texts of numbers too, and its data."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "a"}\n' * 16)
    (tmp_path / "job.yaml").write_text(
        f"model_name_or_path: {model}\ndataset_name: ./data\nreward_funcs: [think_format_reward]\n"
        "num_generations: 4\nbeta: 4e-2\nattn_implementation: eager\ndtype: bfloat16\nuse_peft: true\n"
        "lora_r: 8\nlora_target_modules: [q_proj, v_proj]\n"
    )
    source = read_script("trl.scripts.grpo", ["--config", "job.yaml"])
    assert (source.algorithm, source.lora_rank, source.lora_dropout) == ("grpo", 8, 0.05)
    expected = {"num_generations": 4, "beta": 0.04, "attention": "eager", "dtype": "bfloat16", "model": model}
    assert {name: source.settings[name] for name in expected} == expected


@pytest.mark.usefixtures("warm_process")
def test_quantized_weights_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not covered."""
    text = (
        "import sys\nfrom transformers import AutoModelForCausalLM as M\n"
        "M.from_pretrained(sys.argv[1], load_in_4bit=True)\n"
    )
    with pytest.raises(ConfigError, match="quantized weights are not covered"):
        read_script(_script(tmp_path, text, monkeypatch), [model])


def test_the_script_of_the_readme_is_planned_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model's context bounds the prompts, of which it says nothing, and it asks for the CPU where there
    is no GPU. Given lengths that do not fit are refused with the options that set them.
    """
    script = str(Path(__file__).parents[2] / "examples" / "grpo.py")
    monkeypatch.setattr(requested_job, "has_gpu", lambda: False)
    read = functools.cache(read_script)  # the script runs once for both commands
    monkeypatch.setattr(plan, "read_script", lambda path, words, ranks: read(path, tuple(words), ranks))
    assert main(["plan", "--no-changes", script]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 120 + 8 tokens" in printed
    assert (
        "Nothing says how long prompts are: 120 tokens, which fill the model's context (--prompt)." in printed
    )
    assert "as this is a CPU" in printed
    assert main(["plan", script, "--prompt", "200"]) == 2
    assert "give a smaller --prompt or --completion" in capsys.readouterr().err
