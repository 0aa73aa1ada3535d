"""The TRL script of the benchmark of watching: a tiny GRPO training whose ranks wait or compute on request.

Does not use `grpo_run` and does not inject faults.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

import tiny
import work
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument(
        "--late-seconds", type=float, default=0.0, help="how much later rank 0 is in each step"
    )
    parser.add_argument("--late-from", type=int, default=0, help="the first step in which it is late")
    parser.add_argument(
        "--forward-seconds", type=float, default=0.0, help="computing in each training forward"
    )
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    model = tiny.policy(len(tokenizer), arguments)
    inner = tiny.rewards(arguments.step_seconds)

    def overlap(*positional: Any, **keywords: Any) -> Any:
        late = os.environ.get("RANK") == "0" and trainer.state.global_step + 1 >= arguments.late_from
        time.sleep(arguments.late_seconds if late else 0.0)
        return inner(*positional, **keywords)

    def compute(module: Any, *_: Any) -> None:
        end = time.monotonic() + (arguments.forward_seconds if module.training else 0.0)
        while time.monotonic() < end:
            work.compute(10)

    model.register_forward_pre_hook(compute)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=overlap,
        args=GRPOConfig(**tiny.settings(arguments), **tiny.rollout_settings(arguments)),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
    )
    tiny.train(trainer, arguments)


if __name__ == "__main__":
    main()
