"""A GRPO script that generates greedily, so how completions are batched changes none of them.

The completions of a group are the same; their rewards differ by their place in the batch, so there is
something to learn. Writes `weights.sha256`.
"""

from __future__ import annotations

from typing import Any

import tiny

GREEDILY = {"generation_kwargs": {"do_sample": False}}


def by_place(completions: list[str], **_: Any) -> list[float]:
    """Reward a completion by its place in its group, and by what it says."""
    return [float(place % 4) + 0.01 * len(set(completion)) for place, completion in enumerate(completions)]


def main() -> None:
    arguments = tiny.rollout_parser(__doc__).parse_args()
    trainer = tiny.rollout_trainer(arguments, reward_funcs=by_place, settings=GREEDILY)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
