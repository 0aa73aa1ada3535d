"""What the plain TRL scripts beside it share: a model, a tokenizer and data built on the spot, and a digest.

The scripts import it as any user's script imports a file beside it. It knows nothing of what launches it
and never reads the network. Everything here is deterministic: two runs of one script with the same
arguments and the same number of ranks end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

ALPHABET = string.digits + string.ascii_lowercase + " +=."
PROMPT_CHARACTERS = 6


def use_test_shims() -> None:
    """Apply the shims that the environment asks for; call it before any trainer or its arguments are made."""
    if os.environ.get("TEST_FSDP_ON_CPU") == "1":
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shims"))
        import fsdp_on_cpu

        fsdp_on_cpu.install()


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--save-total-limit", type=int, default=None)
    parser.add_argument("--logging-steps", type=float, default=10)
    parser.add_argument("--per-device-train-batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slept once in every reward or batch")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there is an accelerator")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, if there is one"
    )
    parser.add_argument("--texts", type=int, default=None, help="how many; one long epoch if not given")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="more of the trainer's arguments"
    )
    parser.add_argument("--exit-at-step", type=int, default=None, help="leave without a word after this step")
    return parser


def rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the two scripts that generate."""
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument("--steps-per-generation", type=int, default=None)
    parser.add_argument("--max-completion-length", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=None, help="how many; one long epoch if not given")
    parser.add_argument("--eval-prompts", type=int, default=None, help="evaluate on as many")
    parser.add_argument(
        "--save-inside-rollouts", action="store_true", help="what was launched keeps rollouts in checkpoints"
    )


def evaluation(arguments: argparse.Namespace) -> Dataset | None:
    """The prompts to evaluate on, if the arguments ask for any."""
    return prompts(arguments.eval_prompts) if arguments.eval_prompts else None


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of `transformers.TrainingArguments` that every script uses."""
    return {
        "output_dir": str(arguments.output_dir),
        "max_steps": arguments.max_steps,
        "save_strategy": "steps",
        "save_steps": arguments.save_steps,
        "save_total_limit": arguments.save_total_limit,
        "logging_steps": arguments.logging_steps,
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "use_cpu": arguments.cpu or not torch.cuda.is_available(),
        "bf16": False,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
        "report_to": [],
        **arguments.settings,
    }


def rollout_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What GRPO and RLOO take beside `settings`."""
    return {
        "num_generations": arguments.num_generations,
        "num_iterations": arguments.num_iterations,
        "steps_per_generation": arguments.steps_per_generation,
        "max_completion_length": arguments.max_completion_length,
        "temperature": 1.0,
        "beta": 0.0,
        **arguments.settings,
    }


def check_rollout_boundaries(arguments: argparse.Namespace) -> None:
    """Stop a run whose checkpoints would fall inside a rollout: TRL does not save the rollout it is in."""
    if arguments.save_inside_rollouts:
        return
    micro_steps = arguments.save_steps * arguments.gradient_accumulation_steps
    steps_per_generation = arguments.steps_per_generation or arguments.gradient_accumulation_steps
    if micro_steps % (steps_per_generation * arguments.num_iterations):
        raise SystemExit("--save-steps does not fall on a rollout boundary")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    fast = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = Split("", "isolated")
    fast.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(vocabulary_size: int, seed: int) -> Qwen2ForCausalLM:
    """Two layers, sixteen wide, float32, the same weights on every rank."""
    set_seed(seed)
    configuration = Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(configuration)


def policy(vocabulary_size: int, arguments: argparse.Namespace) -> Qwen2ForCausalLM:
    """`model`, and where the settings ask for a reference model also on disk, which TRL reads the reference from."""
    made = model(vocabulary_size, arguments.seed)
    if arguments.settings.get("beta"):
        folder = arguments.output_dir / "initial"
        if os.environ.get("RANK", "0") == "0" and not folder.is_dir():
            made.save_pretrained(folder.with_name("initial.partial"))
            folder.with_name("initial.partial").rename(folder)
        deadline = time.monotonic() + 60
        while not folder.is_dir():
            if time.monotonic() > deadline:
                raise SystemExit(f"rank 0 did not write {folder}")
            time.sleep(0.01)
        made.config._name_or_path = str(folder)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            import deepspeed

            deepspeed.init_distributed("gloo")  # or it reads the reference model as one rank of one
    return made


def prompts(count: int) -> Dataset:
    """`count` prompts of equal length, all different in expectation."""
    source = random.Random(3)
    rows = [
        "".join(source.choices(string.digits + string.ascii_lowercase, k=PROMPT_CHARACTERS))
        for _ in range(count)
    ]
    return Dataset.from_dict({"prompt": rows})


def texts(count: int) -> Dataset:
    """`count` little sums, written out."""
    source = random.Random(5)
    pairs = [(source.randrange(10, 50), source.randrange(10, 50)) for _ in range(count)]
    return Dataset.from_dict({"text": [f"{left}+{right}={left + right}." for left, right in pairs]})


def prompts_for_one_epoch(arguments: argparse.Namespace) -> int:
    """How many prompts were asked for, or make one epoch a little longer than the run, whatever the number of ranks."""
    return arguments.prompts or -(-texts_for_one_epoch(arguments) // arguments.num_generations)


def texts_for_one_epoch(arguments: argparse.Namespace) -> int:
    """How many samples were asked for, or make one epoch a little longer than the run, whatever the number of ranks."""
    if arguments.texts:
        return int(arguments.texts)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    samples_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
    return (arguments.max_steps + 2) * samples_per_step


def rewards(step_seconds: float) -> Any:
    """A reward that differs within a group and asks for letters of the prompt; sleeps once a batch."""

    def overlap(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        if step_seconds:
            time.sleep(step_seconds)
        return [
            len(set(prompt) & set(completion)) + 0.01 * len(set(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    return overlap


class ExitAtStep(TrainerCallback):
    """Leaves the process at the end of a step, before its checkpoint, as a killed process would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os._exit(9)


class SleepAtStep(TrainerCallback):
    """Stretches every step, where there is no reward function to sleep in."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def callbacks(arguments: argparse.Namespace) -> list[TrainerCallback]:
    """The callbacks that the arguments ask for."""
    return [] if arguments.exit_at_step is None else [ExitAtStep(arguments.exit_at_step)]


def train(trainer: Any, arguments: argparse.Namespace) -> None:
    """`trainer.train()`, from the last checkpoint where the arguments say so."""
    checkpoint = None
    if arguments.resume and arguments.output_dir.is_dir():
        checkpoint = get_last_checkpoint(str(arguments.output_dir))
    trainer.train(resume_from_checkpoint=checkpoint)


def digest(state: dict[str, torch.Tensor]) -> str:
    """sha256 over names, types, shapes and bytes of a full state dict, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write_digest(trainer: Any, output_dir: Path) -> None:
    """Gather the full weights (every rank must call it); rank 0 writes their digest to `weights.sha256`."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        path = output_dir / "weights.sha256"
        path.with_suffix(".partial").write_text(digest(state) + "\n")
        path.with_suffix(".partial").rename(path)
    trainer.accelerator.wait_for_everyone()
