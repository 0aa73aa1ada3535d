"""A TRL script whose rollouts grow: the prompts of each rollout are longer than those of the one before, up
to the last step.

GRPO, or RLOO with `--rloo`. As `grpo.py` in everything else. Writes `weights.sha256`, and what was logged as
`logged-rank{r}.json`.
"""

from __future__ import annotations

import json
import os
import random
import string

import tiny
from datasets import Dataset
from trl import GRPOTrainer, RLOOTrainer

SHORTEST = 4


def prompts(rollouts: int, per_rollout: int, growth: int) -> Dataset:
    """Return prompts in the order in which they are used."""
    source = random.Random(3)
    rows = [
        "".join(
            source.choices(
                string.digits + string.ascii_lowercase, k=SHORTEST + growth * (index // per_rollout)
            )
        )
        for index in range(rollouts * per_rollout)
    ]
    return Dataset.from_dict({"prompt": rows})


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument(
        "--growth", type=int, default=4, help="characters by which prompts grow with each rollout"
    )
    parser.add_argument("--rloo", action="store_true", help="train with RLOO")
    arguments = parser.parse_args()
    kind = RLOOTrainer if arguments.rloo else GRPOTrainer
    config = tiny.rollout_config(arguments, kind, shuffle_dataset=False)
    samples = config.generation_batch_size
    steps = config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps
    rollouts = int(-(-arguments.max_steps // steps)) + 1
    data = prompts(rollouts, samples // arguments.num_generations, arguments.growth)
    trainer = tiny.rollout_trainer(arguments, kind, args=config, train_dataset=data)
    tiny.train(trainer, arguments)
    logged = arguments.output_dir / f"logged-rank{os.environ.get('RANK', '0')}.json"
    logged.write_text(json.dumps(trainer.state.log_history))
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
