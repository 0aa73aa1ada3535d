"""`grpo.py` whose own code runs out of memory once, at a place of one step, on one rank; its reward mentions memory always.

`--place quoted` raises an error that only quotes such a message. A marker in the output directory says that it has happened.
The script does not know what launches it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

PLACES = ("generate", "score", "forward", "backward", "optimizer", "quoted")
MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is free."


class Exhausting(GRPOTrainer):  # type: ignore[misc]
    """Runs out of memory where it is told to."""

    faults: tuple[tuple[str, int], ...] = ()
    fault_rank = 0

    def _fail(self, place: str) -> None:
        step = self.state.global_step + 1
        marker = Path(self.args.output_dir) / f"{place}.done"
        here = (place, step) in self.faults and int(os.environ.get("RANK", "0")) == self.fault_rank
        if not here or marker.exists():
            return
        marker.touch()
        if place == "quoted":
            raise ValueError(f"the judge has answered: {MESSAGE}")
        raise torch.OutOfMemoryError(MESSAGE)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        self._fail("score")
        return scored

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._fail("forward")
        self._fail("quoted")
        loss = super().compute_loss(*args, **kwargs)
        loss.register_hook(lambda gradient: self._fail("backward"))
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda *arguments: self._fail("optimizer"))
        return optimizer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--place", action="append", default=[], metavar="PLACE@STEP")
    parser.add_argument("--fault-rank", type=int, default=1)
    arguments = parser.parse_args()
    plain = tiny.rewards(arguments.step_seconds)

    def reward(completions: list[str], **kwargs: Any) -> Any:
        print(f"RuntimeError: {MESSAGE}", flush=True)
        return plain(completions=completions, **kwargs)

    tokenizer = tiny.tokenizer()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = Exhausting(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=reward,
        args=GRPOConfig(**{**tiny.settings(arguments), **tiny.rollout_settings(arguments)}),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
    )
    trainer.faults = tuple(
        (place, int(step)) for place, _, step in (one.partition("@") for one in arguments.place)
    )
    trainer.fault_rank = arguments.fault_rank
    generate = trainer.model.generate

    def generate_or_fail(*args: Any, **kwargs: Any) -> Any:
        trainer._fail("generate")
        return generate(*args, **kwargs)

    trainer.model.generate = generate_or_fail
    tiny.train(trainer, arguments)


if __name__ == "__main__":
    main()
