"""Shared code of the plain TRL scripts in this folder: model, tokenizer, data, and a digest of the weights.

The scripts import it as a user's script imports a file beside it. It does not know what launches it and does
not use the network. Two runs of one script with the same arguments and number of ranks end with the same
weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

ALPHABET = string.digits + string.ascii_lowercase + " +=."
PROMPT_CHARACTERS = 6
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
"""What this release of transformers calls it; older ones of TRL turn it on by default."""


def use_test_shims() -> None:
    """Apply the shims selected by the environment; call it before creating trainers or their arguments."""
    if os.environ.get("TEST_FSDP_ON_CPU") == "1":
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shims"))
        import fsdp_on_cpu

        fsdp_on_cpu.install()


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every script takes."""
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
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep of every reward call or batch")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there is an accelerator")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint if there is one"
    )
    parser.add_argument("--texts", type=int, default=None, help="number of samples; default one long epoch")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="further arguments of the trainer"
    )
    parser.add_argument(
        "--kill-after-steps", type=int, nargs="*", default=[], help="a rank kills itself after each of these"
    )
    parser.add_argument("--lora", action="store_true", help="train an adapter of PEFT")
    parser.add_argument("--lora-dropout", type=float, default=0.1, help="of the adapter's inputs")
    return parser


def rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the scripts that generate."""
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument("--steps-per-generation", type=int, default=None)
    parser.add_argument("--max-completion-length", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=None, help="number of samples; default one long epoch")
    parser.add_argument("--eval-prompts", type=int, default=None, help="number of evaluation prompts")
    parser.add_argument(
        "--save-inside-rollouts", action="store_true", help="the launcher saves rollouts with checkpoints"
    )


def rollout_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments of the scripts that generate."""
    parser = argument_parser(description or "")
    rollout_arguments(parser)
    return parser


def evaluation(arguments: argparse.Namespace) -> Dataset | None:
    """Return the evaluation prompts, None by default."""
    return prompts(arguments.eval_prompts) if arguments.eval_prompts else None


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `transformers.TrainingArguments` that every script uses."""
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
        CHECKPOINTING: False,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
        "report_to": [],
        **arguments.settings,
    }


def rollout_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of GRPO and RLOO besides `settings`."""
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
    """Reject checkpoints inside a rollout: TRL does not save the current rollout."""
    if arguments.save_inside_rollouts:
        return
    micro_steps = arguments.save_steps * arguments.gradient_accumulation_steps
    steps_per_generation = arguments.steps_per_generation or arguments.gradient_accumulation_steps
    if micro_steps % (steps_per_generation * arguments.num_iterations):
        raise SystemExit("--save-steps is not a multiple of a rollout's steps")


def rollout_config(arguments: argparse.Namespace, trainer: Any = None, **changes: Any) -> Any:
    """Return the configuration of a trainer that generates, GRPO's by default.

    Args:
        trainer: class of the trainer.
        changes: further settings, which precede those of the command line.
    """
    from trl import GRPOConfig, RLOOConfig, RLOOTrainer

    use_test_shims()
    config = RLOOConfig if trainer is not None and issubclass(trainer, RLOOTrainer) else GRPOConfig
    return config(**{**settings(arguments), **rollout_settings(arguments), **changes})


def rollout_trainer(arguments: argparse.Namespace, trainer: Any = None, **changes: Any) -> Any:
    """Return a trainer that generates with the tiny model, data and reward.

    Args:
        trainer: its class, GRPO's by default.
        changes: arguments of it that differ; `settings` are further settings of its configuration.
    """
    from trl import GRPOTrainer

    check_rollout_boundaries(arguments)
    changed = changes.pop("settings", {})
    makers: dict[str, Callable[[], Any]] = {
        "args": lambda: rollout_config(arguments, trainer, **changed),
        "processing_class": tokenizer,
        "model": lambda: policy(len(tokenizer()), arguments),
        "reward_funcs": lambda: rewards(arguments.step_seconds),
        "train_dataset": lambda: prompts(prompts_for_one_epoch(arguments)),
        "eval_dataset": lambda: evaluation(arguments),
        "callbacks": lambda: callbacks(arguments),
    }
    made = {name: make() for name, make in makers.items() if name not in changes}
    return (trainer or GRPOTrainer)(**made, **adapter(arguments), **changes)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    fast = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = Split("", "isolated")
    fast.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # before transformers 5 also token types
    )  # fmt: skip


def model(vocabulary_size: int, seed: int, **changes: Any) -> Qwen2ForCausalLM:
    """Return a model with two layers of width 16 in float32, with the same weights on every rank.

    Args:
        changes: settings of its configuration that differ.
    """
    set_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))


def policy(vocabulary_size: int, arguments: argparse.Namespace) -> Qwen2ForCausalLM:
    """Return `model`.

    If the settings ask for a reference model, also save it, because TRL loads the reference from disk.
    """
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

            deepspeed.init_distributed("gloo")  # otherwise it loads the reference model as a single rank
    return made


def prompts(count: int) -> Dataset:
    """Return `count` random prompts of equal length."""
    source = random.Random(3)
    rows = [
        "".join(source.choices(string.digits + string.ascii_lowercase, k=PROMPT_CHARACTERS))
        for _ in range(count)
    ]
    return Dataset.from_dict({"prompt": rows})


def texts(count: int) -> Dataset:
    """Return `count` small sums as text."""
    source = random.Random(5)
    pairs = [(source.randrange(10, 50), source.randrange(10, 50)) for _ in range(count)]
    return Dataset.from_dict({"text": [f"{left}+{right}={left + right}." for left, right in pairs]})


def prompts_for_one_epoch(arguments: argparse.Namespace) -> int:
    """Return the number of prompts given, or enough for one epoch slightly longer than the run."""
    return arguments.prompts or -(-texts_for_one_epoch(arguments) // arguments.num_generations)


def texts_for_one_epoch(arguments: argparse.Namespace) -> int:
    """Return the number of samples given, or enough for one epoch slightly longer than the run."""
    if arguments.texts:
        return int(arguments.texts)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    samples_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
    return (arguments.max_steps + 2) * samples_per_step


steps_begun = itertools.count(1)


def pause(seconds: float) -> None:
    """Sleep in a step, and wait as `support.runs.Run.held` asks, at most two minutes."""
    begun = next(steps_begun)
    if seconds:
        time.sleep(seconds)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if begun > int(Path("hold").read_text()):
                time.sleep(0.02)
                continue
        return


def rewards(step_seconds: float) -> Any:
    """Return a reward for letters of the prompt, which differs within a group; it sleeps once per batch."""

    def overlap(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pause(step_seconds)
        return [
            len(set(prompt) & set(completion)) + 0.01 * len(set(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    return overlap


class SleepAtStep(TrainerCallback):
    """Sleeps in every step, for scripts without a reward function."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pause(self.seconds)


class KillOnce(TrainerCallback):
    """Kills this process at the end of a step, unless the file exists that it then creates."""

    def __init__(self, step: int, marker: Path) -> None:
        self.step = step
        self.marker = marker

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class KillAfterSteps(TrainerCallback):
    """A rank, each step another one, kills itself as the system would, before the step that follows each of
    these.

    When everything that belongs to the step is done; and in the step's save, if there is one. As often as
    each step is named; every output directory counts for itself.
    """

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def _kill(self, args: Any, state: Any, when: str) -> None:
        step, ranks = state.global_step, int(os.environ["WORLD_SIZE"])
        if int(os.environ["RANK"]) != step % ranks:
            return
        for number in range(self.steps.count(step)):
            marker = Path(f"killed-{Path(args.output_dir).name}-{when}-{step}-{number}")
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._kill(args, state, "after")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._kill(args, state, "saved")


def callbacks(arguments: argparse.Namespace) -> list[TrainerCallback]:
    """Return the callbacks that the arguments ask for."""
    return [KillAfterSteps(arguments.kill_after_steps)] if arguments.kill_after_steps else []


def adapter(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of a trainer that trains an adapter of PEFT, whose dropout draws random numbers
    unless it is 0.
    """
    if not arguments.lora:
        return {}
    from peft import LoraConfig

    return {
        "peft_config": LoraConfig(
            r=2, lora_dropout=arguments.lora_dropout, target_modules=["q_proj", "v_proj"]
        )
    }


def train(trainer: Any, arguments: argparse.Namespace) -> None:
    """Call `trainer.train()`, from the last checkpoint if the arguments say so."""
    checkpoint = None
    if arguments.resume and arguments.output_dir.is_dir():
        checkpoint = get_last_checkpoint(str(arguments.output_dir))
    trainer.train(resume_from_checkpoint=checkpoint)


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return the sha256 of names, types, shapes and bytes of a full state dict, ordered by name."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write_digest(trainer: Any, output_dir: Path) -> None:
    """Gather the full weights on every rank; rank 0 writes them to `weights.safetensors`, and their digest to
    `weights.sha256`.
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        save_file(
            {name: one.detach().cpu().clone() for name, one in state.items()},
            output_dir / "weights.safetensors",
        )
        path = output_dir / "weights.sha256"
        path.with_suffix(".partial").write_text(digest(state) + "\n")
        path.with_suffix(".partial").rename(path)
    trainer.accelerator.wait_for_everyone()
