"""A GRPO script like `grpo.py` whose learning fails: a loss becomes NaN, or the reward collapses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny
import torch
from trl import GRPOTrainer


class FailingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Its loss is NaN on rank 0 at one step, once, or until the random generators have another seed."""

    nan_at: int | None = None
    cured_by_seeds = False
    marker = Path("nan")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step + 1 != self.nan_at or os.environ["RANK"] != "0":
            return loss
        if self.cured_by_seeds:
            return loss * float("nan") if torch.initial_seed() == self.args.seed else loss
        if self.marker.exists():
            return loss
        self.marker.touch()
        return loss * float("nan")


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--nan-at", type=int, default=None, metavar="STEP")
    parser.add_argument("--marker", type=Path, default=Path("nan"), help="of what was done")
    parser.add_argument("--cured-by-seeds", action="store_true")
    parser.add_argument("--reward-falls-at", type=int, default=None, metavar="STEP")
    arguments = parser.parse_args()
    overlap = tiny.rewards(arguments.step_seconds)

    def falling(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        rewards: list[float] = overlap(prompts, completions)
        falls = (
            arguments.reward_falls_at is not None
            and trainer_state.global_step + 1 >= arguments.reward_falls_at
        )
        return [0.001 * reward - 2.0 for reward in rewards] if falls else rewards

    falling.__name__ = "overlap"
    trainer = tiny.rollout_trainer(arguments, FailingTrainer, reward_funcs=falling)
    trainer.nan_at, trainer.marker = arguments.nan_at, arguments.marker
    trainer.cured_by_seeds = arguments.cured_by_seeds
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
