"""A plain TRL GRPO script: a tiny model, one long epoch, a checkpoint every few steps.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`; the environment selects the
parallelism mode. Writes `weights.sha256` and, with `--record-partition`, `partition-rank{r}.json`.
"""

from __future__ import annotations

import tiny


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--record-partition", action="store_true", help="record what each rank holds")
    parser.add_argument("--stream", action="store_true", help="read the prompts from a stream")
    arguments = parser.parse_args()
    changes = {}
    if arguments.stream:
        prompts = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
        changes["train_dataset"] = prompts.to_iterable_dataset()
    trainer = tiny.rollout_trainer(arguments, **changes)
    if arguments.record_partition:
        from partition import RecordPartition

        trainer.add_callback(RecordPartition(trainer, arguments.output_dir))
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
