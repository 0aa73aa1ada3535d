"""A plain TRL GRPO script of an agent: each completion calls one tool, and each rollout has an environment.

The tiny model cannot write a tool call, so the script reads one into every first completion. `--late N` makes
the asynchronous tool wait for ever in its Nth call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import tiny
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

TEMPLATE = (
    "{%- for message in messages -%}{{ message.role[0] }} {{ message.content }}{%- for call in"
    " message.tool_calls or [] -%}{{ call.function.name }} {{ call.function.arguments }}{%- endfor -%}.{%-"
    " endfor -%}{%- if add_generation_prompt -%}a {%- endif -%}"
)
calls = itertools.count(1)
late = 0


class Sums:
    """An environment whose tools add and remember."""

    def reset(self, **row: Any) -> None:
        """Begin a rollout."""
        self.total = 0

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: to add.
        """
        self.total += number
        return str(self.total)


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: to look up.
    """
    if next(calls) == late:
        await asyncio.Event().wait()
    await asyncio.sleep(0.01)
    return word[::-1]


def read_a_tool_call(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """Return the completion as a message, with tool calls unless a tool has answered already."""
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    if "t " not in tokenizer.decode(prefix or []):
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in (("add", {"number": len(ids)}), ("look_up", {"word": "abc"}))
        ]
    return message


def main() -> None:
    global late
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument(
        "--late", type=int, default=0, help="call of the tool that waits for ever; 0 for none"
    )
    arguments = parser.parse_args()
    late = arguments.late
    train(arguments, read_a_tool_call, tools=[look_up], environment_factory=Sums)


def length(completions: list[Any], **row: Any) -> list[float]:
    """Reward the length of the last message."""
    return [float(len(one[-1]["content"])) for one in completions]


def train(arguments: Any, read: Callable[..., Any], **agent: Any) -> None:
    """Train the tiny agent, and write the digest of its weights.

    Args:
        read: takes the place of TRL's reader of completions.
        agent: its tools and environment, and what rewards it in place of `length`.
    """
    grpo_trainer.parse_response = read

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_schema = {}  # not used, but required
    rows = tiny.prompts(tiny.prompts_for_one_epoch(arguments))["prompt"]
    lengths = {"max_completion_length": 40, **arguments.settings}
    settings = {**tiny.settings(arguments), **tiny.rollout_settings(arguments), **lengths}
    agent.setdefault("reward_funcs", length)
    trainer = GRPOTrainer(
        model=tiny.policy(len(tokenizer), arguments),
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": row}] for row in rows]}),
        processing_class=tokenizer,
        callbacks=tiny.callbacks(arguments),
        **agent,
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
