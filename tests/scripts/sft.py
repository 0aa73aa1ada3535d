"""A plain TRL SFT script: the same tiny model learns small sums.

Run it with `torchrun`, `accelerate launch` or `grpo-run launch`. Writes `weights.sha256` at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tiny
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer


def trainer_for(
    arguments: argparse.Namespace,
    output_dir: Path,
    tokenizer: PreTrainedTokenizerFast,
    model: Qwen2ForCausalLM,
) -> Any:
    """Return the trainer of this script; `sft_then_grpo.py` uses it too."""
    return SFTTrainer(
        model=model,
        args=SFTConfig(**{**tiny.settings(arguments), "output_dir": str(output_dir)}, max_length=32),
        train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[*tiny.callbacks(arguments), tiny.SleepAtStep(arguments.step_seconds)],
    )


def main() -> None:
    arguments = tiny.argument_parser(__doc__).parse_args()
    tiny.use_test_shims()

    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer), arguments.seed)
    trainer = trainer_for(arguments, arguments.output_dir, tokenizer, model)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
