"""A plain TRL GRPO script in which generation fails whenever one prompt is in the batch.

`--bad-prompt N` names the prompt by its number in the data set; `--how` says whether generation raises or hangs.
"""

from __future__ import annotations

import time
from typing import Any

import tiny
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--bad-prompt", type=int, required=True, help="number of the prompt")
    parser.add_argument("--how", choices=("raise", "hang"), default="raise", help="how generation fails")
    arguments = parser.parse_args()

    tokenizer = tiny.tokenizer()
    rows = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
    bad = tokenizer(rows[arguments.bad_prompt]["prompt"])["input_ids"]
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        reward_funcs=tiny.rewards(arguments.step_seconds),
        args=GRPOConfig(**{**tiny.settings(arguments), **tiny.rollout_settings(arguments)}),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
    )
    generate = trainer.model.generate

    def fragile(input_ids: Any, **keywords: Any) -> Any:
        if bad in input_ids.tolist():
            if arguments.how == "hang":
                time.sleep(3600)
            raise RuntimeError("the prompt cannot be generated from")
        return generate(input_ids=input_ids, **keywords)

    trainer.model.generate = fragile
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
