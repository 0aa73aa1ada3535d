"""A plain TRL GRPO script: a tiny model, one long epoch, a checkpoint every few steps.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`; the environment selects the
parallelism mode. Writes `weights.sha256` and, with `--record-partition`, `partition-rank{r}.json`.
"""

from __future__ import annotations

import tiny
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--record-partition", action="store_true", help="record what each rank holds")
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)
    tiny.use_test_shims()

    config = GRPOConfig(**{**tiny.settings(arguments), **tiny.rollout_settings(arguments)})
    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=tiny.rewards(arguments.step_seconds),
        args=config,
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        eval_dataset=tiny.evaluation(arguments),
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
        **tiny.adapter(arguments),
    )
    if arguments.record_partition:
        from partition import RecordPartition

        trainer.add_callback(RecordPartition(trainer, arguments.output_dir))
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
