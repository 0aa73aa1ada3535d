"""Two trainers in one script: a warm start with SFT, then GRPO with the same model.

    grpo-run launch --nproc-per-node 2 examples/sft_then_grpo.py
    torchrun --nproc-per-node 2 examples/sft_then_grpo.py

The warm start demonstrates how to reverse a number, with half of the demonstrations wrong. GRPO then rewards
correct answers, and the reward rises from about 0.5 to about 0.9, within half a minute on a CPU. The script
does not use grpo-run. If a rank dies during GRPO, `grpo-run launch` does not repeat the warm start.
"""

import random

import torch
from datasets import Dataset
from tiny import tiny
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def reversed_number(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return 1 if the completion is the reversed number, else 0."""
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


def demonstration(rng: random.Random) -> dict[str, str]:
    """Return a number and, with probability 0.5, its reversal; otherwise the number again."""
    number = str(rng.randrange(10, 100))
    return {"prompt": f"{number}>", "completion": number[::-1] if rng.random() < 0.5 else number}


def main() -> None:
    model, tokenizer = tiny("0123456789>")
    rng = random.Random(0)
    cpu = not torch.accelerator.is_available()
    shared = {
        "logging_steps": 1,
        "save_total_limit": 2,
        "gradient_checkpointing": False,
        "bf16": not cpu,
        "use_cpu": cpu,
        "report_to": [],
    }

    SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="runs-output/sft_then_grpo/sft",
            max_steps=120,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            save_steps=60,
            **shared,
        ),
        train_dataset=Dataset.from_list([demonstration(rng) for _ in range(7680)]),
        processing_class=tokenizer,
    ).train()

    numbers = [str(rng.randrange(10, 100)) for _ in range(2000)]
    GRPOTrainer(
        model=model,
        reward_funcs=reversed_number,
        args=GRPOConfig(
            output_dir="runs-output/sft_then_grpo/grpo",
            max_steps=60,
            per_device_train_batch_size=64,
            num_generations=16,
            max_completion_length=4,
            learning_rate=1e-3,
            save_steps=10,
            **shared,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"{number}>" for number in numbers], "answer": [number[::-1] for number in numbers]}
        ),
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main()
