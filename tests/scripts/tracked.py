"""A plain TRL SFT script that reports to trackers."""

from __future__ import annotations

import tiny
from trl import SFTConfig, SFTTrainer


def main() -> None:
    arguments = tiny.argument_parser(__doc__).parse_args()
    tokenizer = tiny.tokenizer()
    trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        args=SFTConfig(**tiny.settings(arguments), max_length=32),
        train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[*tiny.callbacks(arguments), tiny.SleepAtStep(arguments.step_seconds)],
    )
    tiny.train(trainer, arguments)


if __name__ == "__main__":
    main()
