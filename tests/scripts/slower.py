"""A GRPO script of which one of two reward functions gets slower with every step."""

from __future__ import annotations

import itertools
import time
from typing import Any

import tiny
import torch

SECONDS = 0.0001
"""What each step adds."""


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    calls = itertools.count()

    def even(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    def searching(completions: list[str], **_: Any) -> list[float]:
        time.sleep(SECONDS * next(calls))
        return [float(len(text)) for text in completions]

    trainer = tiny.rollout_trainer(arguments, reward_funcs=[even, searching])
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
