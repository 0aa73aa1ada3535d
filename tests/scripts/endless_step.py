"""A GRPO script whose ranks are busy for ever in one step: the reward asks all ranks again and again whether
they are done.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tiny
import torch


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--endless-at", type=int, required=True, metavar="STEP")
    parser.add_argument("--attempts", type=int, default=1, help="attempts that do not get past the step")
    arguments = parser.parse_args()
    overlap = tiny.rewards(0.0)

    def asking(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step + 1 == arguments.endless_at:
            marker = Path(f"asked-{torch.distributed.get_rank()}")
            tries = int(marker.read_text()) if marker.exists() else 0
            marker.write_text(str(tries + 1))
            while tries < arguments.attempts:
                torch.distributed.all_reduce(torch.zeros(1))
                time.sleep(0.05)
        rewards: list[float] = overlap(prompts, completions)
        return rewards

    asking.__name__ = "overlap"
    trainer = tiny.rollout_trainer(arguments, reward_funcs=asking)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
