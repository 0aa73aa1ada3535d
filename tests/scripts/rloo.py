"""A plain TRL RLOO script: the same tiny model, data and reward as `grpo.py`, another advantage.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`. Writes `weights.sha256` at the end.
"""

from __future__ import annotations

import tiny
from trl import RLOOTrainer


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    trainer = tiny.rollout_trainer(arguments, RLOOTrainer)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
