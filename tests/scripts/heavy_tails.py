"""A plain TRL GRPO script whose generation takes log-normal times, most of them short.

The random numbers of the training are those of `grpo.py`.
"""

from __future__ import annotations

import random
import time
from typing import Any

import tiny
from trl import GRPOTrainer

MEDIAN_SECONDS, SIGMA, MAX_SECONDS = 0.05, 1.5, 3.0


class Trainer(GRPOTrainer):
    """A user's subclass that generates with heavy-tailed delays."""

    def _generate(self, prompts: Any) -> Any:
        draw = random.Random(f"{self.args.seed} {self.state.global_step} {self.args.process_index}")
        time.sleep(min(MEDIAN_SECONDS * draw.lognormvariate(0.0, SIGMA), MAX_SECONDS))
        return super()._generate(prompts)


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    trainer = tiny.rollout_trainer(arguments, Trainer)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
