"""A plain TRL SFT script that a callback ends early, with another callback whose state changes the weights.

Evaluates and saves at every step. With `--kill-after-saves`, a rank kills itself once after the save of each
of these steps, as the system would.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter, deque
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Perturbation(TrainerCallback):
    """Scales a weight after each step by a factor that depends on all earlier steps."""

    def __init__(self) -> None:
        self.random = random.Random(5)
        self.generator = torch.Generator().manual_seed(6)
        self.factors: deque[float] = deque(maxlen=3)
        self.steps: Counter[bool] = Counter()
        self.seen: set[int] = set()
        self.strength = 0.01

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.factors.append(self.random.random() + torch.rand((), generator=self.generator).item())
        self.steps[state.global_step % 2 == 0] += 1
        self.seen.add(state.global_step)
        factor = 1 + self.strength * (sum(self.factors) + self.steps[True] + len(self.seen))
        with torch.no_grad():
            kwargs["model"].get_output_embeddings().weight.mul_(factor)


class KillOnce(TrainerCallback):
    """Kills a rank, each step another one, after the save of given steps; once per step."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        ranks = int(os.environ["WORLD_SIZE"])
        if step in self.steps and int(os.environ["RANK"]) == step % ranks:
            try:
                Path(f"killed-{step}").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--kill-after-saves", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    settings = {
        **tiny.settings(arguments),
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": False,
        "metric_for_best_model": "eval_loss", "greater_is_better": True,
        # a loss that falls is no improvement
    }  # fmt: skip
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        args=SFTConfig(**settings, max_length=32),
        train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
        eval_dataset=tiny.texts(4),
        processing_class=tokenizer,
        callbacks=[Perturbation(), stopping, KillOnce(arguments.kill_after_saves)],
    )
    tiny.train(trainer, arguments)
    Path(f"steps-{os.environ['RANK']}.txt").write_text(str(trainer.state.global_step))
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
