"""A greedy GRPO script whose generation never returns in one step if a call has too many rows, on rank 1.

Greedy, so how completions are batched changes none of them. Without `--most-rows` it never gets stuck. Writes
`weights.sha256`. The script does not know what launches it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import greedy
import tiny
import torch


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--most-rows", type=int, default=0, metavar="N", help="of a call that returns")
    parser.add_argument("--stuck-step", type=int, default=3)
    arguments = parser.parse_args()
    trainer = tiny.rollout_trainer(arguments, reward_funcs=greedy.by_place, settings=greedy.GREEDILY)

    def get_stuck(module: Any, args: Any, kwargs: Any) -> None:
        rows = len(kwargs["input_ids"])
        due = trainer.state.global_step + 1 == arguments.stuck_step and not torch.is_grad_enabled()
        # generation reads the prompt first, or one token; scoring reads all tokens at once and has no cache
        if due and kwargs.get("past_key_values") is not None and rows > arguments.most_rows:
            time.sleep(10_000)

    if arguments.most_rows and os.environ["RANK"] == "1":
        trainer.model.register_forward_pre_hook(get_stuck, with_kwargs=True)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
