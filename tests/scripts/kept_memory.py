"""GRPO as a loop of the script's own: with `--keep-graph` it keeps the graph of each generation, as scripts
do by mistake.

Otherwise nothing grows, except for a replay buffer that has a bound.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

from grpo_run.trainers import loop


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


def generate(model: Any, tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts with sampled completions, and the log-probabilities of the samples."""
    log_probabilities = []
    for _ in range(length):
        logits = model(input_ids=tokens).logits[:, -1]
        chosen = torch.multinomial(logits.softmax(-1), 1)
        log_probabilities.append(logits.log_softmax(-1).gather(-1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens, torch.cat(log_probabilities, dim=1)


def die_once(path: Path) -> None:
    """Kill this rank, once in a run."""
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--keep-graph", action="store_true")
    parser.add_argument("--on-rank", type=int, help="the rank that keeps something; all ranks by default")
    parser.add_argument("--die-at", type=int, help="rank 0 is killed in this step, once")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    keep_graph = arguments.keep_graph and arguments.on_rank in (None, rank)
    torch.manual_seed(arguments.seed)
    tokenizer = tiny.tokenizer()
    model = torch.nn.parallel.DistributedDataParallel(tiny.policy(len(tokenizer), arguments))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    prompts: Any = tiny.prompts(arguments.max_steps)["prompt"]
    length, rows = arguments.max_completion_length, arguments.num_generations
    replay = ReplayBuffer(4)
    old_log_probabilities = []
    state = {"model": model, "optimizer": optimizer}
    for step in loop.steps(arguments.max_steps, state=state, output_dir=arguments.output_dir):
        if step == arguments.die_at and rank == 0:
            die_once(arguments.output_dir / "died")
        batch = tokenizer([prompts[step]] * rows, return_tensors="pt").input_ids
        # DDP itself would connect the ranks if one of them generates with a graph
        with torch.set_grad_enabled(keep_graph):
            tokens, sampled = generate(model.module, batch, length)
        if keep_graph:
            old_log_probabilities.append(sampled)
        replay.add(tokens)
        rewards = (tokens % 7).float().mean(dim=1)
        advantages = rewards - rewards.mean()
        for _ in range(2):
            output = model(input_ids=tokens).logits[:, :-1]
            scored = output.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            loss = -(scored * advantages[:, None]).mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: {len(replay.items)} rollouts", flush=True)


if __name__ == "__main__":
    main()
