"""The TRL script of the recovery and overhead benchmarks: a tiny GRPO training with a step log.

Started on two ranks by the launcher that is measured. It does not use `grpo_run`; its own callback records
the times, so they are measured in the same way under every launcher. Does not inject faults.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

import tiny
import work
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer


class StepLog(TrainerCallback):
    """Append monotonic seconds, step and process ID at the end of each step, in a single write.

    Args:
        path: base path of the log; `.{rank}` is appended.
    """

    def __init__(self, path: Path) -> None:
        rank = os.environ.get("RANK", "0")
        self._file = open(f"{path}.{rank}", "ab", buffering=0)  # noqa: SIM115 - stays open until the process exits

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._file.write(f"{time.monotonic():.6f} {state.global_step} {os.getpid()}\n".encode())


class LoggedBefore(TrainerCallback):
    """Begin with a log history as long as after many steps, with the fields that GRPO logs.

    Args:
        entries: its length.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        names = [f"rewards/function {number}/mean" for number in range(26)]
        for step in range(len(state.log_history), self._entries):
            values = {name: number / (step + 3) for number, name in enumerate(names)}
            state.log_history.append(values | {"epoch": 0.0, "step": step})


def policy(vocabulary_size: int, millions: float, seed: int) -> Any:
    """Return a model of about `millions` million parameters in float32; 0 stands for the tests' model."""
    if not millions:
        return tiny.model(vocabulary_size, seed)
    width = next(width for limit, width in ((1, 64), (20, 256), (float("inf"), 1024)) if millions < limit)
    parameters_per_layer = 4 * width**2 + 3 * width * (11 * width // 4)
    set_seed(seed)
    configuration = Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=max(1, round(millions * 1e6 / parameters_per_layer)),
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(configuration)


def record_start(path: Path, main_began_at: float) -> None:
    """Append to a file beside the step log when `main` began, and the present time. Call it before
    `train()`.
    """
    with open(f"{path}.starts.{os.environ.get('RANK', '0')}", "ab", buffering=0) as file:
        file.write(f"{main_began_at:.6f} {time.monotonic():.6f} {os.getpid()}\n".encode())


def rewards_with_work(step_seconds: float, compute_units: int) -> Any:
    """Return the tests' reward function with a fixed amount of sleep and computing.

    A step that waited until a deadline instead would hide the overhead of a supervisor.
    """
    inner = tiny.rewards(step_seconds)

    def overlap(prompts: list[str], completions: list[str], **keywords: Any) -> Any:
        work.compute(compute_units)
        return inner(prompts, completions, **keywords)

    return overlap


def main() -> None:
    began_at = time.monotonic()
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument(
        "--step-log", type=Path, required=True, help="file to append to at the end of each step"
    )
    parser.add_argument(
        "--compute-units", type=int, default=0, help="units of computing per reward call; see work.py"
    )
    parser.add_argument(
        "--size", type=float, default=0.0, metavar="MILLIONS", help="parameters; default: the tests' model"
    )
    parser.add_argument(
        "--history", type=int, default=0, metavar="ENTRIES", help="entries that are logged before"
    )
    parser.add_argument("--no-save", action="store_true", help="write no checkpoint")
    parser.add_argument("--checkpointing", action="store_true", help="of activations, as TRL's default is")
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)

    settings = tiny.settings(arguments)
    if arguments.no_save:
        settings["save_strategy"] = "no"
    settings[tiny.CHECKPOINTING] = arguments.checkpointing
    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=policy(len(tokenizer), arguments.size, arguments.seed),
        reward_funcs=rewards_with_work(arguments.step_seconds, arguments.compute_units),
        args=GRPOConfig(**settings, **tiny.rollout_settings(arguments)),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[StepLog(arguments.step_log), LoggedBefore(arguments.history)],
    )
    record_start(arguments.step_log, began_at)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
