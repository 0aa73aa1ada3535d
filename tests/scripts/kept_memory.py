"""GRPO as a loop of the script's own, with neither Trainer nor `loop`, that keeps memory without need in the ways of `--keep`.

Each way is a mistake that scripts make. Without `--keep` nothing grows, except for a replay buffer that has a bound. Run it with
`grpo-run launch --memory-trace`.
"""

from __future__ import annotations

from typing import Any

import tiny
import torch

WAYS = ("graph", "padding", "rollouts", "logits", "cycle", "traceback", "last_error")


class Collector:
    """Collects what a step has made."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.kept_logits: list[torch.Tensor] = []


class Rollout:
    """A rollout that refers to itself."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.whole = self


class ReplayBuffer:
    """The last rollouts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: list[torch.Tensor] = []

    def add(self, tokens: torch.Tensor) -> None:
        """Add a rollout, and drop the oldest one beyond the capacity."""
        self.items.append(tokens)
        if len(self.items) > self.capacity:
            del self.items[0]


def generate(
    model: Any, tokens: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the prompts with sampled completions, the log-probabilities of the samples, and the last logits."""
    log_probabilities = []
    for _ in range(length):
        logits = model(input_ids=tokens).logits[:, -1]
        chosen = torch.multinomial(logits.softmax(-1), 1)
        log_probabilities.append(logits.log_softmax(-1).gather(-1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens, torch.cat(log_probabilities, dim=1), logits


def score(tokens: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the reward of each sample."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
    if limit < positions.shape[1]:
        raise ValueError("a sample is too long")
    return (tokens % 7).float().mean(dim=1)


errors: list[Exception] = []


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--keep", nargs="*", choices=WAYS, default=[])
    arguments = parser.parse_args()
    keep = set(arguments.keep)
    torch.manual_seed(arguments.seed)
    tokenizer = tiny.tokenizer()
    model = tiny.policy(len(tokenizer), arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    prompts: Any = tiny.prompts(arguments.max_steps)["prompt"]
    length, rows = arguments.max_completion_length, arguments.num_generations
    collector, replay, last_error = Collector(), ReplayBuffer(4), None
    old_log_probabilities = []
    for step in range(arguments.max_steps):
        batch = tokenizer([prompts[step]] * rows, return_tensors="pt").input_ids
        with torch.set_grad_enabled("graph" in keep):
            tokens, sampled, logits = generate(model, batch, length)
        if "graph" in keep:
            old_log_probabilities.append(sampled)
        if "rollouts" in keep:
            collector.history.append({"step": step, "tokens": tokens.clone()})
        if "logits" in keep:
            collector.kept_logits.append(logits.detach().clone())
        if "cycle" in keep:
            Rollout(tokens.repeat(1, 2))
        replay.add(tokens)
        rewards = score(tokens, 10_000)
        try:
            score(tokens, 1)
        except ValueError as error:
            if "traceback" in keep:
                errors.append(error)
            if "last_error" in keep:
                last_error = error
        mask = torch.ones_like(tokens)
        if "padding" in keep:
            wide = tokenizer.pad(
                {"input_ids": tokens.tolist()}, padding="max_length", max_length=128, return_tensors="pt"
            )
            tokens, mask = wide.input_ids, wide.attention_mask
        advantages = rewards - rewards.mean()
        for _ in range(2):
            output = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
            scored = output.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            loss = -(scored * advantages[:, None] * mask[:, 1:]).mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: {len(replay.items)} rollouts, {last_error}", flush=True)


if __name__ == "__main__":
    main()
