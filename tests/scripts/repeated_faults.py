"""A GRPO script with a bug that comes again: in a reward function, or whenever it resumes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback
from trl import GRPOTrainer


class Dies(TrainerCallback):
    """Kills the process once in the run, as the system would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        marker = Path("died")
        if state.global_step == self.step and not marker.exists():
            marker.touch()
            tiny.os.kill(tiny.os.getpid(), tiny.signal.SIGKILL)


class AddsAdapter(GRPOTrainer):
    """Cannot resume: what it loads already exists."""

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Adapter teacher already exists")


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--fault", required=True, choices=["third-call", "resume", "reads-checkpoint"])
    arguments = parser.parse_args()
    calls = itertools.count(1)
    overlap = tiny.rewards(arguments.step_seconds)

    def judge(prompts: list[str], completions: list[str], **fields: Any) -> Any:
        call = next(calls)
        if arguments.fault == "third-call" and call == 3:
            raise KeyError("answer")
        return overlap(prompts, completions)

    resumes = arguments.fault == "resume"
    if arguments.fault == "reads-checkpoint" and Path("died").exists():
        raise RuntimeError("the checkpoint has no adapter")
    trainer = tiny.rollout_trainer(
        arguments, AddsAdapter if resumes else None, reward_funcs=judge,
        callbacks=[Dies(step=5)] if resumes or arguments.fault == "reads-checkpoint" else [],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(trainer.args.output_dir)


if __name__ == "__main__":
    main()
