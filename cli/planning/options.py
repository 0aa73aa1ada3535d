"""The command line of `grpo-run plan`, and its values as sizes in bytes. Called by `cli/plan.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.planning.job import ALGORITHMS, ATTENTIONS, DTYPE_BYTES, LAYOUTS, OPTIMIZERS

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT])(i?)B", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MAX_BYTES = 1 << 50


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size with a unit, such as `80GiB` or `22.65GB`.

    Raises:
        UsageError: it has no unit, or is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        hint = "; give a unit, such as 80GiB" if re.fullmatch(r"[0-9.]+", text.strip()) else ""
        raise UsageError(f"{option} {text!r}: expected a size such as 80GiB or 22.65GB{hint}")
    number, power, binary = float(found[1]), _POWERS[found[2].lower()], 1024 if found[3] else 1000
    size = int(number * binary**power)
    if not 0 < size <= MAX_BYTES:
        raise UsageError(f"{option} {text!r}: expected a size above 0 and up to 1024TiB")
    return size


def split_arguments(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words before and after `--`: those of plan, and those of the script."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def build_parser() -> CommandParser:
    """Return the parser of `grpo-run plan`. Options that are not given are None, so that a recipe or script
    counts.
    """
    parser = CommandParser(
        prog="grpo-run plan",
        description=(
            "Predict the memory of a GRPO, RLOO or SFT job without a GPU, by tracing TRL's own code without"
            " data."
        ),
        epilog="What is not given is taken from the script or recipe, then from TRL's defaults.",
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SCRIPT_OR_RECIPE",
        help="a training script (its arguments after --), a recipe, or a YAML file for TRL's scripts",
    )
    model = parser.add_argument_group("model and sizes")
    model.add_argument(
        "--model", metavar="NAME_OR_PATH", help="folder with config.json, cached repository, or shape"
    )
    model.add_argument("--batch", type=int, metavar="ROWS", help="per_device_train_batch_size")
    model.add_argument("--prompt", type=int, metavar="TOKENS", help="longest prompt (default: 256)")
    model.add_argument("--completion", type=int, metavar="TOKENS", help="max_completion_length")
    model.add_argument("--length", type=int, metavar="TOKENS", help="max_length of SFT")
    model.add_argument("--accumulation", type=int, metavar="N", help="gradient_accumulation_steps")
    model.add_argument("--steps-per-generation", type=int, metavar="N", help="default: the accumulation")
    model.add_argument("--num-iterations", type=int, metavar="N", help="updates per rollout")
    model.add_argument(
        "--num-generations", type=int, metavar="N", help="completions per prompt (default: 8; RLOO: 2)"
    )
    settings = parser.add_argument_group("settings")
    settings.add_argument("--algorithm", choices=ALGORITHMS, help="whose trainer runs (default: grpo)")
    settings.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help="of the weights (default: float32)")
    settings.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="autocast (default: on)")
    settings.add_argument(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction, help="(default: on)"
    )
    settings.add_argument("--optim", choices=OPTIMIZERS, help="optimizer")
    settings.add_argument("--beta", type=float, metavar="X", help="not 0: a reference model is kept")
    settings.add_argument("--attention", choices=ATTENTIONS, help="(default: sdpa)")
    settings.add_argument("--lora-rank", type=int, metavar="R", help="of peft's LoRA; 0: no adapters")
    settings.add_argument(
        "--lora-targets", metavar="NAMES", help="modules with adapters, such as q_proj,v_proj or all-linear"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", metavar="SIZE", help="memory of one GPU, with a unit: 80GiB")
    machine.add_argument(
        "--device", choices=("cuda", "cpu"), help="whose kernels are assumed (default: cuda)"
    )
    machine.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks (default: 1)")
    machine.add_argument("--layout", choices=LAYOUTS, help="(default: ddp)")
    machine.add_argument(
        "--vllm-share", type=float, metavar="X", help="vllm_gpu_memory_utilization, if colocated"
    )
    machine.add_argument("--vllm-sleep", action=argparse.BooleanOptionalAction, help="vllm_enable_sleep_mode")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--no-changes", action="store_true", help="do not predict changes and what fits")
    return parser
