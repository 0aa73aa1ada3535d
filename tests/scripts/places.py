"""A plain TRL GRPO run that calls a function of its caller at every place of a user's code.

`hangs.py` and `oddities.py` beside it are scripts made of it. The places lie before, in, between and after
`train()` calls; see `PLACES`. Without effects of the function, two runs with the same arguments end with the
same weights, in `weights.sha256`. The code does not know what launches it.
"""

from __future__ import annotations

import argparse
import atexit
import threading
from collections.abc import Callable
from typing import Any

import tiny
import torch
from datasets import Dataset
from sft import trainer_for
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl import GRPOTrainer

Visit = Callable[[str, int], None]
"""Called with a place and the number of the step that is under way, 0 before and after training."""
IN_EVERY_STEP = ("callback", "thread", "save", "reward", "data", "generate")
"""Places in every step, in `save` in every step that is saved."""
PLACES = (
    *IN_EVERY_STEP, "startup", "map", "first", "evaluation", "evaluated", "save-model", "own-save", "between",
    "exit-handler", "left-thread",
)  # fmt: skip


class Visitor(TrainerCallback):
    """Visits places and knows the current step; also the user's callback."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.finished_step = 0

    def visit(self, place: str) -> None:
        """Call the function, with the step under way."""
        self._visit(place, self.finished_step + 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.finished_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.visit("callback")
        thread = threading.Thread(target=self.visit, args=("thread",), daemon=True)
        thread.start()  # FAULT: thread-start
        thread.join()  # FAULT: thread
        self.finished_step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._visit("save", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.visit("evaluated")


class Trainer(GRPOTrainer):
    """A user's trainer with a method of its own for the model's files."""

    visit: Callable[[str], None] | None = None

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self.visit is not None:
            self.visit("save-model")
        super()._save(*args, **kwargs)


class Picklable:
    """A value in the user's own file."""

    def __init__(self, visit: Callable[[str], None]) -> None:
        self.visit = visit

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.visit("own-save")
        return int, (0,)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that `run` uses."""
    parser = tiny.rollout_parser(description)
    parser.add_argument("--calls", type=int, choices=(1, 2), default=1, help="number of `train()` calls")
    return parser


def run(arguments: argparse.Namespace, visit: Visit) -> None:
    """Train, and call `visit` at every place."""
    visitor = Visitor(visit)
    visitor.visit("startup")
    tokenizer = tiny.tokenizer()
    model = _first_call(arguments, tokenizer) if arguments.calls == 2 else None
    visitor.visit("between")
    trainer = tiny.rollout_trainer(
        arguments, Trainer,
        model=_generating(model or tiny.model(len(tokenizer), arguments.seed), visitor),
        reward_funcs=_rewards(visitor, arguments.step_seconds),
        train_dataset=_prompts(visitor, tiny.prompts_for_one_epoch(arguments), "training"),
        eval_dataset=_prompts(visitor, 4, "evaluation"),
        callbacks=[visitor],
        settings={"eval_strategy": "steps", "eval_steps": 8},
    )  # fmt: skip
    tiny.train(trainer, arguments)
    trainer.visit = visitor.visit
    trainer.save_model(str(arguments.output_dir / "final"))
    own = arguments.output_dir / f"own-{trainer.args.process_index}.pt"
    torch.save({"own": Picklable(visitor.visit)}, own)
    tiny.write_digest(trainer, arguments.output_dir)
    atexit.register(visitor.visit, "exit-handler")
    threading.Thread(target=visitor.visit, args=("left-thread",)).start()


def _first_call(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Train with SFT and return the model."""
    first = {"max_steps": 4, "output_dir": arguments.output_dir / "sft"}
    sft = argparse.Namespace(**{**vars(arguments), **first})
    trainer = trainer_for(sft, sft.output_dir, tokenizer, tiny.model(len(tokenizer), arguments.seed))
    tiny.train(trainer, sft)
    trainer.save_model(str(sft.output_dir / "final"))
    trainer.accelerator.wait_for_everyone()
    return Qwen2ForCausalLM.from_pretrained(sft.output_dir / "final", dtype=torch.float32)


def _rewards(visitor: Visitor, step_seconds: float) -> Any:
    plain = tiny.rewards(step_seconds)

    def overlap(prompts: list[str], completions: list[str], source: list[str], **_: Any) -> Any:
        if source[0] == "evaluation":
            visitor.visit("evaluation")
        else:
            visitor.visit("reward" if visitor.finished_step else "first")
        return plain(prompts, completions)

    return overlap


def _prompts(visitor: Visitor, count: int, source: str) -> Dataset:
    """Return prompts made by `map` and read by a transform."""

    def add_source(row: dict[str, Any]) -> dict[str, Any]:
        visitor.visit("map")
        return {"source": source}

    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        visitor.visit("data")
        return batch

    return tiny.prompts(count).map(add_source).with_transform(read)


def _generating(model: Any, visitor: Visitor) -> Any:
    """Return the model with a `generate` of the user's."""
    plain = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        visitor.visit("generate")
        return plain(*args, **kwargs)

    model.generate = generate
    return model
