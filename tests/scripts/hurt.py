"""A plain TRL GRPO script whose own code hurts it: `grpo.py`, with one mistake on one rank at one step.

A hang or a wrong collective happens once: the marker `hurt.done` in the output directory is written just before, so a
restarted script goes on unharmed and ends with the weights of `grpo.py` at the same arguments. Every line
that hurts carries the comment `HURT: <kind>`, so that a test finds its number by searching this source.
Knows nothing of what launches it.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

KINDS = (
    "reward-sleep",
    "reward-lock",
    "reward-regex",
    "reward-stop",
    "data-sleep",
    "save-sleep",
    "exit-sleep",
    "extra-collective",
    "extra-reduce",
    "generation-tail",
)
MAX_TAIL_SECONDS = 3.0


class Harm:
    """Says whether now is the time: the rank, the step, and not done in an earlier life."""

    def __init__(self, kind: str | None, rank: int, step: int, output_dir: Path) -> None:
        self.kind = kind
        self.step = step
        self.global_step = 0
        self._here = int(os.environ.get("RANK", "0")) == rank
        self._marker = output_dir / "hurt.done"

    def due(self, kind: str, step_under_way: int | None = None) -> bool:
        """Whether `kind` is to be done now; true once in all lives of the script."""
        step = self.global_step + 1 if step_under_way is None else step_under_way
        if self.kind != kind or not self._here or step != self.step or self._marker.exists():
            return False
        self._marker.parent.mkdir(parents=True, exist_ok=True)
        self._marker.touch()
        return True


class Position(TrainerCallback):
    """Keeps the step where the data and the reward function, which are not told it, can see it."""

    def __init__(self, harm: Harm) -> None:
        self.harm = harm

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.harm.global_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.harm.global_step = state.global_step


def _mean_of_nothing() -> torch.Tensor:
    return torch.ones(3, device="cuda" if "nccl" in str(torch.distributed.get_backend()) else "cpu")


def rewards(harm: Harm, step_seconds: float) -> Any:
    """The reward of `grpo.py`, with what may go wrong inside one."""
    plain = tiny.rewards(step_seconds)

    def overlap(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if harm.due("reward-sleep"):
            time.sleep(1e6)  # HURT: reward-sleep
        if harm.due("reward-lock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # HURT: reward-lock
        if harm.due("reward-regex"):
            re.match(r"(a+)+$", "a" * 100 + "b")  # HURT: reward-regex
        if harm.due("reward-stop"):
            os.kill(os.getpid(), signal.SIGSTOP)  # HURT: reward-stop
        if harm.due("extra-collective"):
            # Gloo aborts a rank at once: what the others call next is an all_gather of more
            copies = [_mean_of_nothing() for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(copies, _mean_of_nothing())  # HURT: extra-collective
        if harm.due("extra-reduce"):
            # Gloo waits for ever: what the others call next is no all_reduce
            torch.distributed.all_reduce(_mean_of_nothing())  # HURT: extra-reduce
        return plain(prompts, completions, **columns)

    return overlap


def slow_data(dataset: Any, harm: Harm) -> Any:
    """The same rows, through a function that may hang while it reads them."""

    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if harm.due("data-sleep"):
            time.sleep(1e6)  # HURT: data-sleep
        return batch

    return dataset.with_transform(read)


class Trainer(GRPOTrainer):
    """A user's subclass: it generates with a heavy tail, and may hang while it saves."""

    harm: Harm
    tail_seconds: float

    def _generate(self, prompts: Any) -> Any:
        if self.harm.kind == "generation-tail":
            # its own generator: the run's random state is that of the undisturbed run
            draw = random.Random(f"{self.args.seed} {self.state.global_step} {self.args.process_index}")
            seconds = self.tail_seconds * draw.lognormvariate(0.0, 1.5)
            time.sleep(min(seconds, MAX_TAIL_SECONDS))  # HURT: generation-tail
        return super()._generate(prompts)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.harm.due("save-sleep", self.state.global_step):
            time.sleep(1e6)  # HURT: save-sleep
        super()._save_checkpoint(*args, **kwargs)


def hang_at_exit(harm: Harm) -> None:
    """What a library's forgotten thread or socket does after the script's last line."""
    if harm.due("exit-sleep", harm.step):
        time.sleep(1e6)  # HURT: exit-sleep


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--hurt", choices=KINDS, default=None)
    parser.add_argument("--hurt-rank", type=int, default=1)
    parser.add_argument("--hurt-step", type=int, default=3, help="for save-sleep, a step that is saved")
    parser.add_argument("--tail-seconds", type=float, default=0.05, help="the median of generation-tail")
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)
    tiny.use_test_shims()
    harm = Harm(arguments.hurt, arguments.hurt_rank, arguments.hurt_step, arguments.output_dir)

    config = GRPOConfig(**tiny.settings(arguments), **tiny.rollout_settings(arguments))
    tokenizer = tiny.tokenizer()
    trainer = Trainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        reward_funcs=rewards(harm, arguments.step_seconds),
        args=config,
        train_dataset=slow_data(tiny.prompts(tiny.prompts_for_one_epoch(arguments)), harm),
        processing_class=tokenizer,
        callbacks=[*tiny.callbacks(arguments), Position(harm)],
    )
    trainer.harm = harm
    trainer.tail_seconds = arguments.tail_seconds
    atexit.register(hang_at_exit, harm)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
