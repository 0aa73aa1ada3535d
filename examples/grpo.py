"""A minimal GRPO script with TRL, which teaches a model to write even digits.

    grpo-run launch --nproc-per-node 2 examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py

The script does not use grpo-run. It takes seconds on a CPU, and the reward rises from about 0.4 towards 1.
"""

import random

import torch
from datasets import Dataset
from tiny import tiny
from trl import GRPOConfig, GRPOTrainer


def even_digits(completions: list[str], **columns: object) -> list[float]:
    """Return the fraction of characters that are even digits."""
    return [sum(text.count(digit) for digit in "02468") / max(len(text), 1) for text in completions]


def main() -> None:
    model, tokenizer = tiny("0123456789>")
    rng = random.Random(0)
    prompts = [f"{rng.randrange(1000)}>" for _ in range(1000)]
    cpu = not torch.accelerator.is_available()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even_digits,
        args=GRPOConfig(
            output_dir="runs-output/grpo",
            max_steps=40,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            learning_rate=2e-3,
            logging_steps=1,
            save_steps=10,
            save_total_limit=2,
            gradient_checkpointing=False,
            bf16=not cpu,
            use_cpu=cpu,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
