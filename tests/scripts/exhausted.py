"""A greedy GRPO script whose own code runs out of memory at a place of one step, on one rank; its reward
mentions memory always.

`--place quoted` raises an error that only quotes such a message. Each place fails once, which a marker in the
output directory says, or with `--always` from its step on. Greedy, so how completions are batched changes
none of them. With `--calls 2` it trains a second time. Writes `weights.sha256`. The script does not know what
launches it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import greedy
import tiny
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25"
    " GiB is free."
)


class Faults:
    """The places at which memory runs out.

    Args:
        arguments: of the script.
    """

    def __init__(self, arguments: Any) -> None:
        self.steps = {place: int(step) for place, _, step in (one.partition("@") for one in arguments.place)}
        self.always = arguments.always
        self.folder = arguments.output_dir
        self.here = int(os.environ.get("RANK", "0")) == arguments.fault_rank

    def fail(self, place: str, step: int = 1) -> None:
        """Run out of memory if that is due."""
        due = self.steps.get(place)
        marker = self.folder / f"{place}.done"
        if not self.here or due is None or (step < due if self.always else step != due or marker.exists()):
            return
        marker.touch()
        if place == "quoted":
            raise ValueError(f"the judge has answered: {MESSAGE}")
        raise torch.OutOfMemoryError(MESSAGE)


class FailingCallback(TrainerCallback):
    """Runs out of memory at the end of a step."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.faults.fail("callback", state.global_step)


class Exhausting(GRPOTrainer):  # type: ignore[misc]
    """Runs out of memory where it is told to."""

    faults: Faults

    def _fail(self, place: str) -> None:
        self.faults.fail(place, self.state.global_step + 1)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda *arguments: self._fail("optimizer"))
        return optimizer


def fail_in_trl() -> None:
    """Let memory run out in TRL's own methods; an override would count as a computation of the script's
    own.
    """
    score, loss_of = GRPOTrainer._generate_and_score_completions, GRPOTrainer.compute_loss

    def failing_score(self: Any, inputs: Any) -> Any:
        scored = score(self, inputs)
        self._fail("score")
        return scored

    def failing_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._fail("forward")
        self._fail("quoted")
        loss = loss_of(self, *args, **kwargs)
        loss.register_hook(lambda gradient: self._fail("backward"))
        return loss

    GRPOTrainer._generate_and_score_completions, GRPOTrainer.compute_loss = failing_score, failing_loss


def trainer_for(arguments: Any, output_dir: Path, model: Any, faults: Faults) -> Any:
    """Return a trainer, in whose rewards, data and generation memory runs out where the faults say so."""

    def reward(completions: list[str], **kwargs: Any) -> Any:
        print(f"RuntimeError: {MESSAGE}", flush=True)
        trainer._fail("reward")
        return greedy.by_place(completions, **kwargs)

    trainer = tiny.rollout_trainer(
        arguments, Exhausting, model=model, reward_funcs=reward, callbacks=[FailingCallback(faults)],
        settings={"output_dir": str(output_dir), **greedy.GREEDILY},
    )  # fmt: skip
    trainer.faults = faults
    generate, collate = trainer.model.generate, trainer.data_collator

    def wrapped_generate(*args: Any, **kwargs: Any) -> Any:
        trainer._fail("wrapped")
        inside = trainer.model.register_forward_pre_hook(lambda *arguments: trainer._fail("generate"))
        try:
            return generate(*args, **kwargs)
        finally:
            inside.remove()

    def failing_collate(samples: Any) -> Any:
        trainer._fail("data")
        return collate(samples)

    trainer.model.generate = wrapped_generate
    trainer.data_collator = failing_collate
    return trainer


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--place", action="append", default=[], metavar="PLACE@STEP")
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--always", action="store_true", help="fail in every step from the given one on")
    parser.add_argument("--calls", type=int, default=1, help="of train()")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    faults = Faults(arguments)
    faults.fail("before")
    fail_in_trl()
    model = tiny.policy(len(tiny.tokenizer()), arguments)
    for call in range(1, arguments.calls + 1):
        last = call == arguments.calls
        folder = arguments.output_dir if last else arguments.output_dir / f"call-{call}"
        trainer = trainer_for(arguments, folder, model, faults)
        tiny.train(trainer, arguments)
        if not last:
            model = tiny.model(len(tiny.tokenizer()), arguments.seed)
            model.load_state_dict(trainer.model.state_dict())
            faults.fail("between")
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
