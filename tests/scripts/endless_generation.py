"""A GRPO script, or a loop of its own, whose generation has no end on the last rank, in the way `--form`.

It happens at step `--at` of the first `--attempts` attempts. The line that generates for ever has the comment
`ENDLESS: <form>`. The forms of `HEALTHY` generate for long and end; the last rank writes to `generated.txt`
how long each generation took. Writes `weights.sha256` if it is a Trainer's. The script does not know what
launches it, apart from the loops of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TOKENS = 6
"""Tokens of a completion that ends."""
LONG = 150
"""Tokens of an evaluation, and of the longest generation of some forms: 25 times as many."""


@dataclass(frozen=True)
class Healthy:
    """A way to generate for long on the last rank.

    Attributes:
        pause: after each token, in seconds.
        tokens: at some steps, in place of `TOKENS`.
        compute: seconds of computing before the first token, at some steps.
    """

    pause: float = 0.03
    tokens: Mapping[int, int] = field(default_factory=dict)
    compute: Mapping[int, float] = field(default_factory=dict)


HEALTHY = {
    "outliers": Healthy(tokens={1: 60, 5: 130, 8: 140, 9: 300}),
    "compilation": Healthy(compute={1: 20.0}),
    "growth": Healthy(tokens={step: round(TOKENS * 1.6 ** (step - 1)) for step in range(1, 11)}),
    "evaluation": Healthy(),
    "long-prompt": Healthy(pause=0.06, compute={8: 8.0}),
    "slow-tokens": Healthy(pause=0.7, tokens={8: 40}),
}
FORMS = ("generate", "rollout", "streaming", "consensus", "loop", *HEALTHY)


class Endless:
    """Says whether the generation that begins now has an end, and how long a token takes."""

    def __init__(self, at: int, attempts: int) -> None:
        self._at, self._attempts = at, attempts

    def begins(self, step: int) -> bool:
        """Return whether the generation of this step never ends."""
        if step != self._at or RANK != RANKS - 1:
            return False
        marker = Path("endless")
        tries = len(marker.read_text()) if marker.exists() else 0
        if tries >= self._attempts:
            return False
        marker.write_text("." * (tries + 1))
        return True


def lengths(endless: bool) -> Iterator[int]:
    """The tokens of a completion, one after another."""
    number = 0
    while endless or number < TOKENS:
        number += 1
        yield number


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows with one token more, of which the model sees the last ones."""
    with torch.no_grad():
        logits = model(input_ids=ids[:, -16:]).logits[:, -1]
    return torch.cat([ids, logits[:, 3:].argmax(-1, keepdim=True) + 3], dim=1)


def compute(seconds: float) -> None:
    """Use the CPU, as a compilation does, or a model that reads a long prompt."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def by_rollout_func(form: str, endless: Endless) -> Callable[..., Any]:
    """Return a `rollout_func` whose loop may have no end, on this rank or on all of them together."""
    healthy = HEALTHY.get(form) if RANK == RANKS - 1 else None

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts, return_tensors="pt", padding=True)["input_ids"]
        step = trainer.state.global_step + 1
        never = form not in HEALTHY and endless.begins(step)
        width, left, began = ids.shape[1], lengths(never), time.monotonic()
        # tokens come all the time in both, and need not use up a core
        pause = {"streaming": 0.5, "rollout": 0.01}.get(form, 0.0) if never else 0.0
        if healthy is not None:
            count = healthy.tokens.get(step, TOKENS) if trainer.model.training else LONG
            left, pause = iter(range(1, count + 1)), healthy.pause
            compute(healthy.compute.get(step, 0.0))
        for _ in left:
            ids = next_token(trainer.model, ids)  # ENDLESS: rollout
            time.sleep(pause)
        if healthy is not None:
            with open("generated.txt", "a") as file:
                file.write(f"{time.monotonic() - began:.2f}\n")
        completions = ids[:, width : width + TOKENS].tolist()
        return {
            "prompt_ids": ids[:, :width].tolist(),
            "completion_ids": completions,
            "logprobs": [[0.0] * len(one) for one in completions],
        }

    return rollout


def never_stop(trainer: Any, endless: Endless) -> None:
    """Let transformers' own loop go on for ever: no token ends a completion, and its length has no limit."""
    original = trainer.model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if not endless.begins(trainer.state.global_step + 1):
            return original(*args, **kwargs)
        while True:
            original(*args, **kwargs)  # ENDLESS: generate

    trainer.model.generate = generate


def train(arguments: Any, endless: Endless) -> None:
    """Train with TRL."""
    own = {} if arguments.form == "generate" else {"rollout_func": by_rollout_func(arguments.form, endless)}
    trainer = tiny.rollout_trainer(arguments, **own)
    if arguments.form == "generate":
        never_stop(trainer, endless)
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


def loop_of_its_own(arguments: Any, endless: Endless) -> None:
    """Take steps on generated tokens."""
    from grpo_run.trainers import consensus, loop

    if RANKS > 1:
        dist.init_process_group("gloo")
    model = tiny.model(len(tiny.tokenizer()), arguments.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in loop.steps(
        arguments.max_steps, state=state, output_dir=arguments.output_dir, save_every=arguments.save_steps
    ):
        ids = torch.full((2, 4), 5)
        left = lengths(endless.begins(step + 1))
        if arguments.form == "consensus":
            for _ in consensus.while_any(lambda: next(left, None) is not None):  # noqa: B023
                ids = next_token(model, ids)  # ENDLESS: consensus
        else:
            for _ in left:
                ids = next_token(model, ids)  # ENDLESS: loop
        tiny.pause(arguments.step_seconds)
        loss = model(input_ids=ids[:, :8]).logits.square().mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--at", type=int, default=5, metavar="STEP")
    parser.add_argument("--attempts", type=int, default=1, help="attempts that do not get past the step")
    arguments = parser.parse_args()
    endless = Endless(arguments.at, arguments.attempts)
    if arguments.form in ("consensus", "loop"):
        loop_of_its_own(arguments, endless)
    else:
        train(arguments, endless)


if __name__ == "__main__":
    main()
