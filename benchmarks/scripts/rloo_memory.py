"""The script of the experiment on RLOO's memory: `rloo_memory.py --method basic --k 8 --output-dir DIR`.

A plain TRL script that any launcher runs, and that `benchmarks/rloo_memory.py` starts once for each setting.
Trains a tiny Qwen3 with a large vocabulary by RLOO, counts live bytes, and writes `memory.json` and the model
into the output directory. Does not use the network or pretrained weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]

from parts.rloo_generation import SwitchedGeneration, use_full_head
from parts.rloo_switches import CHOICES, METHODS, Switches
from support.live_bytes import LiveBytes

from grpo_run.runtime.files import write_json
from grpo_run.runtime.memory.script_settings import CHECKPOINTING
from grpo_run.trainers.recipes.tiny import tiny_tokenizer


class Phases(TrainerCallback):  # type: ignore[misc]
    """Tells the meter which phase of a step begins, by callbacks and by forward passes."""

    def __init__(self, meter: LiveBytes) -> None:
        self.meter = meter

    def before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook of the model: TRL asks for log-probabilities to score and to train."""
        if kwargs.get("fused_lm_head"):
            self.meter.begin("train" if torch.is_grad_enabled() else "score")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin("between")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the script's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, help="the three switches together")
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    parser.add_argument("--k", type=int, required=True, help="completions of each prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=151_936, help="of the model; at least 258")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-bytes", type=int, help="live bytes above which memory is exhausted")
    parser.add_argument("--completions", type=Path, help="folder to replay completions from, or record in")
    parser.add_argument("--output-dir", type=Path, required=True)
    return parser


def switches_of(options: argparse.Namespace) -> Switches:
    """Return the switches of the command line; single ones precede those of the method."""
    single = {name: value for name in CHOICES if (value := getattr(options, name)) is not None}
    return replace(METHODS[options.method or "basic"], **single)


def tiny_qwen3(vocabulary: int, tokenizer: Any) -> Qwen3ForCausalLM:
    """Return a model with two layers of width 64 and always the same weights."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def build_trainer(options: argparse.Namespace) -> Any:
    """Return TRL's trainer, whose step has one micro-batch of k completions for each prompt."""
    tokenizer = tiny_tokenizer()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) / len(ids) / options.vocabulary for ids in completion_ids]

    config = RLOOConfig(
        output_dir=str(options.output_dir), max_steps=options.steps, save_steps=1, logging_steps=1,
        per_device_train_batch_size=options.prompts * options.k, gradient_accumulation_steps=1,
        num_generations=options.k, max_completion_length=options.completion_tokens, beta=0.0,
        temperature=1.0, learning_rate=1e-3, seed=7, use_cpu=not torch.cuda.is_available(), bf16=False,
        ddp_find_unused_parameters=False, dataloader_pin_memory=False, disable_tqdm=True, report_to=[],
        **{name: False for name in CHECKPOINTING if hasattr(RLOOConfig, name)},
    )  # fmt: skip
    prompts = [f"sum {number:03}:" for number in range(options.prompts * options.steps)]
    return RLOOTrainer(
        model=tiny_qwen3(options.vocabulary, tokenizer), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Train one setting, and write what it needed, also if memory was exhausted."""
    options = build_parser().parse_args(arguments)
    switches = switches_of(options)
    trainer = build_trainer(options)
    meter = LiveBytes(options.limit_bytes)
    if switches.head == "full":
        use_full_head(trainer.model, trainer.temperature)
    SwitchedGeneration(trainer, switches, meter, options.completions)
    phases = Phases(meter)
    trainer.add_callback(phases)
    trainer.model.register_forward_pre_hook(phases.before_forward, with_kwargs=True)
    started, exhausted = time.monotonic(), None
    try:
        with meter:
            trainer.train()
    except torch.OutOfMemoryError as error:
        exhausted = str(error)
        raise
    finally:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        write_json(
            options.output_dir / "memory.json",
            {
                "peak_bytes": meter.peak_bytes, "peaks": meter.peaks, "series": meter.series,
                "seconds": time.monotonic() - started, "exhausted": exhausted,
            },
            indent=None,
        )  # fmt: skip
    trainer.save_model()


if __name__ == "__main__":
    main()
