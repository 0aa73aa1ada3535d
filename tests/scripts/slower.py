"""A GRPO script of which one part gets slower with every step.

`--part` is one of: hooks, callback, reward, threads, cache, dataset, none.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import tiny
import torch
from transformers import TrainerCallback

SECONDS = 0.0004
"""What each step adds."""
HOOKS_PER_STEP = 4


class Steps:
    """How many steps were taken."""

    taken = 0


class Grows(TrainerCallback):
    """Add a hook or a thread at each step, or scan a list that grows.

    Args:
        part: what gets slower.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._seen: list[int] = []
        self.model: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        Steps.taken += 1
        if self._part == "hooks":
            for _ in range(HOOKS_PER_STEP):
                self.model.model.embed_tokens.register_forward_hook(
                    lambda module, inputs, output: compute(SECONDS / HOOKS_PER_STEP / 2)
                )
        elif self._part == "threads":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        elif self._part == "callback":
            self._seen.append(state.global_step)
            time.sleep(SECONDS * len(self._seen))


def compute(seconds: float) -> None:
    """Compute for a time too short to sleep: on a busy machine, a sleeper waits longer for a core."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def slow_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what a data set has read, after a search that takes longer and longer."""
    time.sleep(SECONDS * Steps.taken)
    return batch


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--part", default="none", help="what gets slower")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept: list[torch.Tensor] = []

    def even(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    def searching(completions: list[str], **_: Any) -> list[float]:
        if arguments.part == "reward":
            time.sleep(SECONDS * Steps.taken)
        if arguments.part == "cache":
            kept.extend(torch.full((1,), float(len(kept))) for _ in range(300))
            sum(bool(one == -1) for one in kept)
        if arguments.part == "threads":
            time.sleep(SECONDS * threading.active_count())
        return [float(len(text)) for text in completions]

    callback = Grows(arguments.part)
    rows: Any = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
    trainer = tiny.rollout_trainer(
        arguments,
        callbacks=[callback],
        reward_funcs=[even, searching],
        train_dataset=rows.with_transform(slow_row) if arguments.part == "dataset" else rows,
    )
    callback.model = trainer.model
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
