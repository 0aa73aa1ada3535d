"""A GRPO script that generates greedily, so how completions are batched changes none of them.

The completions of a group are the same; their rewards differ by their place in the batch, so there is
something to learn. Writes `weights.sha256`.
"""

from __future__ import annotations

from typing import Any

import tiny
from trl import GRPOConfig, GRPOTrainer


def by_place(completions: list[str], **_: Any) -> list[float]:
    """Reward a completion by its place in its group, and by what it says."""
    return [float(place % 4) + 0.01 * len(set(completion)) for place, completion in enumerate(completions)]


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)
    settings = {**tiny.settings(arguments), **tiny.rollout_settings(arguments)}
    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=by_place,
        args=GRPOConfig(**{**settings, "generation_kwargs": {"do_sample": False}}),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
