"""A TRL script whose rollouts grow: the prompts of each rollout are longer than those of the one before, up
to the last step.

As `grpo.py` in everything else.
"""

from __future__ import annotations

import random
import string

import tiny
from datasets import Dataset
from trl import GRPOTrainer

SHORTEST = 4
GROWTH = 4
"""Characters by which prompts grow with each rollout."""


def prompts(rollouts: int, per_rollout: int) -> Dataset:
    """Return prompts in the order in which they are used."""
    source, characters = random.Random(3), string.digits + string.ascii_lowercase
    lengths = (SHORTEST + GROWTH * (index // per_rollout) for index in range(rollouts * per_rollout))
    return Dataset.from_dict({"prompt": ["".join(source.choices(characters, k=one)) for one in lengths]})


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    config = tiny.rollout_config(arguments, GRPOTrainer, shuffle_dataset=False)
    samples = config.generation_batch_size
    steps = config.steps_per_generation / config.gradient_accumulation_steps
    rollouts = int(-(-arguments.max_steps // steps)) + 1
    data = prompts(rollouts, samples // arguments.num_generations)
    trainer = tiny.rollout_trainer(arguments, GRPOTrainer, args=config, train_dataset=data)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
