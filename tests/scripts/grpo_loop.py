"""The counterpart of `grpo.py` without a Trainer: GRPO as a loop of the script's own, with the same
arguments.

One rank, or DDP on several. Writes `weights.sha256`. Run it with `torchrun` or `grpo-run launch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from grpo_run.trainers import loop


def generate(model: Any, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the prompts with sampled completions."""
    with torch.no_grad():
        for _ in range(length):
            logits = model(input_ids=tokens).logits[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens


def log_probabilities(model: Any, tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the log probability of each completion token."""
    logits = model(input_ids=tokens).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, -length:, None])[..., 0]


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--nan-at", type=int, help="the loss of rank 1 is NaN in this step, once in a run")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokenizer = tiny.tokenizer()
    policy = tiny.policy(len(tokenizer), arguments)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, arguments.max_steps)
    samples: Any = tiny.prompts(tiny.prompts_for_one_epoch(arguments))["prompt"]
    loader = DataLoader(samples, batch_size=1, sampler=DistributedSampler(samples, seed=arguments.seed))
    reward, length = tiny.rewards(arguments.step_seconds), arguments.max_completion_length
    torch.manual_seed(arguments.seed + rank)
    state: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "mean_reward": 0.0,
    }  # fmt: skip
    steps = loop.steps(
        arguments.max_steps, state=state, output_dir=arguments.output_dir, data=loader,
        save_every=arguments.save_steps, save_total_limit=arguments.save_total_limit,
    )  # fmt: skip
    for step, prompts in steps:
        group = list(prompts) * arguments.num_generations
        tokens = generate(policy, tokenizer(group, return_tensors="pt").input_ids, length)
        completions = tokenizer.batch_decode(tokens[:, -length:], skip_special_tokens=True)
        rewards = torch.tensor(reward(prompts=group, completions=completions))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        loss = -(log_probabilities(model, tokens, length) * advantages[:, None]).mean()
        if step + 1 == arguments.nan_at and rank == 1 and not Path("nan").exists():
            Path("nan").touch()
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state["mean_reward"] += 0.2 * (rewards.mean().item() - state["mean_reward"])
        loop.log({"loss": loss, "reward": rewards.mean(), "lr": scheduler.get_last_lr()[0]})
        if rank == 0:
            print(f"step {step + 1}: mean reward {state['mean_reward']:.4f}", flush=True)
    if rank == 0:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        (arguments.output_dir / "weights.sha256").write_text(tiny.digest(policy.state_dict()) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
