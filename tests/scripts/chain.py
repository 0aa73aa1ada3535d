"""A plain TRL GRPO script whose callback saves and stops after some steps of each job, before the last step.

Resumes from its last checkpoint, as jobs in a chain do. `--stop-on-rank` stops on one rank only.
"""

from __future__ import annotations

import os
from typing import Any

import tiny
from transformers import TrainerCallback


class EndOfJob(TrainerCallback):
    """Saves and stops after a number of steps of this job."""

    def __init__(self, steps: int, rank: int | None) -> None:
        self.steps = steps
        self.here = rank is None or int(os.environ["RANK"]) == rank
        self.taken = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.taken += 1
        if self.here and self.taken == self.steps:
            control.should_save = control.should_training_stop = True


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--steps-of-a-job", type=int, default=8)
    parser.add_argument("--stop-on-rank", type=int, default=None)
    arguments = parser.parse_args()
    trainer = tiny.rollout_trainer(arguments)
    trainer.add_callback(EndOfJob(arguments.steps_of_a_job, arguments.stop_on_rank))
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
