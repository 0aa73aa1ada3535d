"""A GRPO script like `grpo.py` in which a bit flips on one rank, as on a device that computes wrongly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer


class Flip(TrainerCallback):  # type: ignore[misc]
    """Flips a bit of one element on one rank when a step begins.

    Args:
        what: a parameter (`weight`), its first moment (`moment`), or its reduced gradient, before or after
            the norm of the gradients is computed (`reduced`, `gradient`).
        moves: whether each flip is of another element.
        marker: a file for each flip that was done.
    """

    def __init__(self, what: str, rank: int, step: int, times: int, moves: bool, marker: Path) -> None:
        self.what, self.rank, self.step, self.times, self.marker = what, rank, step, times, marker
        self.moves = moves

    def _flip(self, state: Any, kind: str, tensor: Any) -> None:
        if kind != self.what or state.global_step + 1 != self.step or os.environ["RANK"] != str(self.rank):
            return
        done = len(list(self.marker.parent.glob(f"{self.marker.name}-*")))
        if done < self.times:
            self.marker.with_name(f"{self.marker.name}-{done}").touch()
            tensor.reshape(-1).view(torch.int32)[5 + done * self.moves] ^= 1 << 22

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Flip in a parameter, or in its first moment."""
        parameter = next(iter(given["model"].parameters()))
        self._flip(state, "weight", parameter.data)
        if state.global_step:
            self._flip(state, "moment", given["optimizer"].state[parameter]["exp_avg"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Flip in a gradient that all ranks have in common."""
        self._flip(state, "gradient", next(iter(given["model"].parameters())).grad)

    def before_clipping(self, trainer: Any) -> None:
        """Let the clipping of a trainer flip first, in a gradient that is not 0."""
        clip = trainer.accelerator.clip_grad_norm_

        def flip_and_clip(parameters: Any, *given: Any, **named: Any) -> Any:
            parameters = list(parameters)
            self._flip(trainer.state, "reduced", parameters[-1].grad)
            return clip(parameters, *given, **named)

        trainer.accelerator.clip_grad_norm_ = flip_and_clip


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--flip", choices=("weight", "moment", "gradient", "reduced"), default="weight")
    parser.add_argument("--flip-rank", type=int, default=1)
    parser.add_argument("--flip-at", type=int, default=0, metavar="STEP")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--moves", action="store_true")
    arguments = parser.parse_args()
    trainer = tiny.rollout_trainer(arguments, GRPOTrainer, reward_funcs=tiny.rewards(arguments.step_seconds))
    flip = Flip(
        arguments.flip, arguments.flip_rank, arguments.flip_at, arguments.times, arguments.moves, Path("flip")
    )
    trainer.add_callback(flip)
    flip.before_clipping(trainer)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
