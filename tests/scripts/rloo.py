"""A plain TRL RLOO script: the same tiny model, data and reward as `grpo.py`, another advantage.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`. Writes `weights.sha256` at the end.
"""

from __future__ import annotations

import tiny
from trl import RLOOConfig, RLOOTrainer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)
    tiny.use_test_shims()

    config = RLOOConfig(**{**tiny.settings(arguments), **tiny.rollout_settings(arguments)})
    tokenizer = tiny.tokenizer()
    trainer = RLOOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=tiny.rewards(arguments.step_seconds),
        args=config,
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        eval_dataset=tiny.evaluation(arguments),
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
