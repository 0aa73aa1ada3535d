"""A minimal GRPO script of an agent with TRL: a calculator as a tool, and a game as an environment.

    grpo-run launch --nproc-per-node 2 --tool-timeout 30 examples/agent.py
    torchrun --nproc-per-node 2 examples/agent.py

The script does not use grpo-run. The model learns to write calls such as `guess7` and `square7`. It takes
half a minute on a CPU. Tools need transformers 5.13 or newer.
"""

import random

import torch
from datasets import Dataset
from tiny import tiny
from trl import GRPOConfig, GRPOTrainer

TOOLS = ["square", "guess"]
TEMPLATE = (
    "{%- for message in messages -%}{{ message.content }}{%- for call in message.tool_calls or [] -%}"
    "{{ call.function.name }}{{ call.function.arguments }}{%- endfor -%};{%- endfor -%}"
    "{%- if add_generation_prompt -%}>{%- endif -%}"
)
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": ">",
    "fields": {
        "tool_calls": {
            "open_pattern": rf"(?P<name>{'|'.join(TOOLS)})(?=\d)",
            "close_pattern": r"(?<=\d)",
            "repeats": True,
            "content": "int",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": {"number": "{content}"}},
            },
        },
        "content": {"content": "text"},
    },
}
"""How a call is read: the name of the tool and one digit. Models that know tools have such a template."""


def square(number: int) -> int:
    """Square a number.

    Args:
        number: to square.
    """
    return number * number


class Game:
    """Guess a digit: a text game of one rollout."""

    def reset(self, secret: int, **row: object) -> None:
        """Begin a rollout with the columns of its row."""
        self.secret = secret
        self.guesses: list[int] = []

    def guess(self, number: int) -> str:
        """Guess the digit; the answer is how far it is away.

        Args:
            number: the guess.
        """
        self.guesses.append(number)
        return str(abs(self.secret - number))

    def get_reward(self) -> float:
        """Return 1 for the digit, and a half for any guess."""
        return 1.0 if self.secret in self.guesses else 0.5 * bool(self.guesses)


def main() -> None:
    model, tokenizer = tiny("0123456789;>")
    tokenizer.backend_tokenizer.model.unk_token = ";"  # stands for the characters that it does not know
    tokenizer.add_tokens(TOOLS)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = CALLS
    rng = random.Random(0)
    secrets = [rng.randrange(10) for _ in range(1000)]
    cpu = not torch.accelerator.is_available()
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir="runs-output/agent",
            max_steps=40,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=24,
            max_tool_calling_iterations=2,
            learning_rate=2e-3,
            logging_steps=1,
            save_steps=10,
            save_total_limit=2,
            gradient_checkpointing=False,
            bf16=not cpu,
            use_cpu=cpu,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": str(one)}] for one in secrets], "secret": secrets}
        ),
        processing_class=tokenizer,
        tools=[square],
        environment_factory=Game,
    )
    trainer.train()


if __name__ == "__main__":
    main()
