"""A plain TRL GRPO script with a fault in its own code: `grpo.py`, with one mistake on one rank at one step.

A hang or a wrong collective happens once: the script writes the marker `fault.done` into the output directory
just before, so that a restarted script trains normally and ends with the weights of `grpo.py` with the same
arguments. Every faulty line has the comment `FAULT: <kind>`, by which tests find its number. The script does
not know what launches it.
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
from trl import GRPOTrainer

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


class Fault:
    """Decides when the fault happens: on its rank, at its step, and not again after a restart."""

    def __init__(self, kind: str | None, rank: int, step: int, output_dir: Path) -> None:
        self.kind = kind
        self.step = step
        self.global_step = 0
        self._here = int(os.environ.get("RANK", "0")) == rank
        self._marker = output_dir / "fault.done"

    def due(self, kind: str, current_step: int | None = None) -> bool:
        """Return whether `kind` happens now; true once, over all restarts."""
        step = self.global_step + 1 if current_step is None else current_step
        if self.kind != kind or not self._here or step != self.step or self._marker.exists():
            return False
        self._marker.parent.mkdir(parents=True, exist_ok=True)
        self._marker.touch()
        return True


class TrackStep(TrainerCallback):
    """Stores the current step for the data and the reward function, which do not get it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.fault.global_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.fault.global_step = state.global_step


def _tensor() -> torch.Tensor:
    return torch.ones(3, device="cuda" if "nccl" in str(torch.distributed.get_backend()) else "cpu")


def rewards(fault: Fault, step_seconds: float) -> Any:
    """Return the reward of `grpo.py` with the faults of reward functions."""
    plain = tiny.rewards(step_seconds)

    def overlap(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if fault.due("reward-sleep"):
            time.sleep(1e6)  # FAULT: reward-sleep
        if fault.due("reward-lock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # FAULT: reward-lock
        if fault.due("reward-regex"):
            re.match(r"(a+)+$", "a" * 100 + "b")  # FAULT: reward-regex
        if fault.due("reward-stop"):
            os.kill(os.getpid(), signal.SIGSTOP)  # FAULT: reward-stop
        if fault.due("extra-collective"):
            # Gloo aborts at once: the next collective of the others is an all_gather of another size
            copies = [_tensor() for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(copies, _tensor())  # FAULT: extra-collective
        if fault.due("extra-reduce"):
            # Gloo waits forever: the next collective of the others is not an all_reduce
            torch.distributed.all_reduce(_tensor())  # FAULT: extra-reduce
        return plain(prompts, completions, **columns)

    return overlap


def slow_data(dataset: Any, fault: Fault) -> Any:
    """Return the same rows, read through a function that may hang."""

    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if fault.due("data-sleep"):
            time.sleep(1e6)  # FAULT: data-sleep
        return batch

    return dataset.with_transform(read)


class Trainer(GRPOTrainer):
    """A user's subclass that generates with heavy-tailed delays and may hang while saving."""

    fault: Fault
    tail_seconds: float

    def _generate(self, prompts: Any) -> Any:
        if self.fault.kind == "generation-tail":
            # a generator of its own, so that the random state equals the undisturbed run's
            draw = random.Random(f"{self.args.seed} {self.state.global_step} {self.args.process_index}")
            seconds = self.tail_seconds * draw.lognormvariate(0.0, 1.5)
            time.sleep(min(seconds, MAX_TAIL_SECONDS))  # FAULT: generation-tail
        return super()._generate(prompts)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.fault.due("save-sleep", self.state.global_step):
            time.sleep(1e6)  # FAULT: save-sleep
        super()._save_checkpoint(*args, **kwargs)


def hang_at_exit(fault: Fault) -> None:
    """Hang in an exit handler, after the script's last line."""
    if fault.due("exit-sleep", fault.step):
        time.sleep(1e6)  # FAULT: exit-sleep


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--fault", choices=KINDS, default=None)
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--fault-step", type=int, default=3, help="for save-sleep, a step that is saved")
    parser.add_argument("--tail-seconds", type=float, default=0.05, help="median delay of generation-tail")
    arguments = parser.parse_args()
    fault = Fault(arguments.fault, arguments.fault_rank, arguments.fault_step, arguments.output_dir)
    trainer = tiny.rollout_trainer(
        arguments, Trainer, reward_funcs=rewards(fault, arguments.step_seconds),
        train_dataset=slow_data(tiny.prompts(tiny.prompts_for_one_epoch(arguments)), fault),
        callbacks=[*tiny.callbacks(arguments), TrackStep(fault)],
    )  # fmt: skip
    trainer.fault = fault
    trainer.tail_seconds = arguments.tail_seconds
    atexit.register(hang_at_exit, fault)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
