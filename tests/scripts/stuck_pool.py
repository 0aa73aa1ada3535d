"""A GRPO script whose reward gives the samples of a batch to a pool of 2 threads, and waits for 0.5 s.

From `--from-step` on the pool is stuck: it judges `--judged` samples of a call and no further one, so that a
batch of 8 ends in `TimeoutError: 6 (of 8) futures unfinished`, and a part of 2 in its rewards. `--then` is
what the script makes of that, and `--form` how it trains: with TRL, or by hand, with or without `loop.steps`.
The rewards are those of a pool that is never stuck. Knows nothing of what launches it.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from functools import partial
from typing import Any

import tiny
import torch
from grpo_loop import generate, log_probabilities

from grpo_run.trainers import loop

THREADS, LIMIT_SECONDS, BATCH = 2, 0.5, 8
Scores = list[float | None]


def judge(text: str, may_end: threading.Event) -> float:
    """Return the share of digits in a completion, once the judge may end."""
    may_end.wait()
    return sum(c.isdigit() for c in text) / max(1, len(text))


def verified(
    prompts: list[str],
    completions: list[str],
    *,
    then: str,
    from_step: int,
    judged: int,
    step: int = 0,
    **columns: Any,
) -> Scores:
    """Judge completions in the pool, and do what `--then` says when the limit expires."""
    step = step or columns["trainer_state"].global_step + 1
    now, later = threading.Event(), threading.Event()
    now.set()
    judged = judged if step >= from_step else len(completions)
    scores: Scores = [None] * len(completions)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        stack.callback(later.set)
        while True:
            futures = {
                pool.submit(judge, text, now if at < judged else later): at
                for at, text in enumerate(completions)
            }
            try:
                wait(list(futures)[:judged])  # however busy the machine is
                for future in as_completed(futures, timeout=LIMIT_SECONDS):  # the limit
                    scores[futures[future]] = future.result()
                return scores
            except TimeoutError:
                if then == "raise":
                    raise
                if then == "leave":
                    return scores
                for future in futures:
                    future.cancel()
                judged = 0  # its threads are not free again


def by_trl(arguments: argparse.Namespace, reward: Callable[..., Scores]) -> None:
    """Train with a GRPOTrainer."""
    trainer = tiny.rollout_trainer(arguments, reward_funcs=reward)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


def by_hand(arguments: argparse.Namespace, reward: Callable[..., Scores]) -> None:
    """Train one rank with a loop of the script's own."""
    tokenizer = tiny.tokenizer()
    policy = tiny.policy(len(tokenizer), arguments)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=arguments.learning_rate)
    prompts = list(tiny.prompts(arguments.max_steps)["prompt"])
    length = arguments.max_completion_length
    steps: Any = range(arguments.max_steps)
    if arguments.form == "steps":
        state: dict[str, Any] = {"model": policy, "optimizer": optimizer}
        steps = loop.steps(arguments.max_steps, state=state, output_dir=arguments.output_dir)
    for step in steps:
        group = [prompts[step]] * BATCH
        tokens = generate(policy, tokenizer(group, return_tensors="pt").input_ids, length)
        completions = tokenizer.batch_decode(tokens[:, -length:], skip_special_tokens=True)
        rewards = torch.tensor([score or 0.0 for score in reward(group, completions, step=step + 1)])
        loss = -(log_probabilities(policy, tokens, length) * (rewards - rewards.mean())[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"took step {step + 1}", flush=True)


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--form", choices=("trl", "steps", "own"), default="trl")
    parser.add_argument("--then", choices=("raise", "leave", "retry"), default="raise")
    parser.add_argument("--from-step", type=int, default=1)
    parser.add_argument("--judged", type=int, default=THREADS)
    parser.set_defaults(per_device_train_batch_size=BATCH, save_steps=1000)
    arguments = parser.parse_args()
    reward = partial(verified, then=arguments.then, from_step=arguments.from_step, judged=arguments.judged)
    reward.__name__ = "verified"  # type: ignore[attr-defined]  # TRL logs it
    (by_trl if arguments.form == "trl" else by_hand)(arguments, reward)


if __name__ == "__main__":
    main()
