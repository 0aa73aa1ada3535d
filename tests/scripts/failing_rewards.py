"""A GRPO or RLOO script with reward functions of which one fails for some completions, and one once on one
rank.

Rank 0 writes each step's completions and advantages, gathered over the ranks
as TRL logs them, to `steps.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainerCallback
from trl import RLOOTrainer

FAULTS = {0: math.nan, 1: math.inf}


def overlap(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Letters of the prompt, but for two completions of seven."""
    return [
        FAULTS.get(zlib.crc32(completion.encode()) % 7, float(len(set(prompt) & set(completion))))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def raising(completions: list[str], **_: Any) -> list[float]:
    """Nothing, but an exception for one completion of seven."""
    for completion in completions:
        if zlib.crc32(completion.encode()) % 7 == 2:
            raise ValueError(f"cannot score {completion!r}")
    return [0.0] * len(completions)


def variety(completions: list[str], **_: Any) -> list[float]:
    """Different letters."""
    return [0.1 * len(set(completion)) for completion in completions]


class Outage:
    """Nothing, but NaN for rank 0's first completion of the fifth step, in the first attempt that comes to
    it.
    """

    __name__ = "outage"

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.fifth_fails = False

    def __call__(self, completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        step, rank = trainer_state.global_step + 1, os.environ["RANK"]
        first = step not in self.asked
        self.asked.add(step)
        if step == 5 and rank == "0" and first and not Path("fifth").exists():
            Path("fifth").touch()
            self.fifth_fails = True
        if step == 5 and self.fifth_fails:
            return [math.nan] + [0.0] * (len(completions) - 1)
        return [0.0] * len(completions)


def plant_loop(model: Any, tokenizer: Any) -> None:
    """Let the letter a be followed by itself, whatever else the model has learned; other tokens lead to it
    now and then.
    """
    token = tokenizer.convert_tokens_to_ids("a")
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, 0] = 0
        embedding[token] = 0
        embedding[token, 0] = 50
        head[token] = 0
        head[token, 0] = 5


class RecordSteps(TrainerCallback):
    """Writes what TRL has logged of each step's rollout."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.is_world_process_zero():
            logs = self.trainer._logs
            record = {"step": state.global_step,
            **{name: list(logs[name]) for name in ("prompt", "completion", "advantages")}}  # fmt: skip
            with open("steps.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument(
        "--raise", action="store_true", dest="raises", help="a function raises, instead of an outage"
    )
    parser.add_argument("--loop", action="store_true", help="plant a loop into the model")
    parser.add_argument("--algorithm", choices=("grpo", "rloo"), default="grpo")
    arguments = parser.parse_args()
    recorder = RecordSteps()
    trainer = tiny.rollout_trainer(
        arguments, RLOOTrainer if arguments.algorithm == "rloo" else None,
        reward_funcs=[overlap, variety, raising if arguments.raises else Outage()], callbacks=[recorder],
    )  # fmt: skip
    if arguments.loop:
        plant_loop(trainer.model, trainer.processing_class)
    recorder.trainer = trainer
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
