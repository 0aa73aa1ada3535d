"""Loops that are written in odd ways: around generators, in functions, by hand, several of them, or none."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch

from grpo_run.trainers import consensus, loop
from odd_loop_kinds.training import STEPS, WIDTH, Training


def progress_bar(t: Training) -> None:
    """A generator around the steps, and one around that."""

    def bar(steps: Any) -> Iterator[int]:
        for step in steps:  # noqa: UP028 - the loop is the generator's own
            yield step

    for step in itertools.islice(bar(t.steps()), None):
        t.step()
        t.logged.append(step)


def caught(t: Training) -> None:
    """Exceptions in the body, `continue`, and an inner loop that is left by `break`."""
    for step in t.steps():
        try:
            if step % 3 == 1:
                raise ValueError(step)
            t.step()
        except ValueError:
            continue
        for inner in range(5):
            if inner == 2:
                break
        else:
            raise AssertionError


def two_loops(t: Training) -> None:
    """One loop after the other, with a step of the optimizer between them."""
    for _ in t.steps(4, name="first"):
        t.step()
    t.step()
    for _ in t.steps(4, name="second"):
        t.step()


def called_twice(t: Training) -> None:
    """The same lines, for two models."""

    def train(name: str) -> None:
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in loop.steps(4, state={"m": model, "o": optimizer}, output_dir=t.folder / name):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
        t.logged.append(model.weight.sum().item())

    train("first")
    train("second")
    t.step()


def no_steps(t: Training) -> None:
    """A loop of no steps, before one with some."""
    for _ in t.steps(0, name="none"):
        raise AssertionError
    for _ in t.steps():
        t.step()


def agreed(t: Training) -> None:
    """The ranks decide together in the reward."""

    def reward(step: int) -> float:
        rounds = 0
        for _ in consensus.while_any(lambda: rounds < 2 + (step + int(os.environ.get("RANK", "0"))) % 3):  # noqa: B023
            rounds += 1
        return float(consensus.any(rounds > 3)) + rounds

    for step in t.steps():
        t.logged.append(reward(step))
        t.step()
        if consensus.all(step == STEPS - 2):
            t.logged.append("last but one")


def changing(t: Training) -> None:
    """Layers are frozen and thawed, evaluation in between, and gradients that are kept for the next step."""
    for step in t.steps():
        t.plain[0].requires_grad_(step % 3 != 1 or t.ddp)
        t.step()
        t.model.eval()
        with torch.inference_mode():
            t.logged.append(t.loss().item())
        t.model.train()
        if t.plain[0].weight.grad is not None and not t.ddp:
            t.plain[0].weight.grad = None


def in_functions(t: Training) -> None:
    """The loop is an argument; the body is a nested function with variables of its own."""
    total = 0.0

    def body(step: int) -> None:
        nonlocal total
        t.step()
        total = t.state["total"] = t.state["total"] + step

    def run(steps: Any) -> None:
        nonlocal total
        total = t.state["total"]
        any(body(step) for step in steps)

    t.state["total"] = 0.0
    run(t.steps())
    t.logged.append(total)


def listed(t: Training) -> None:
    """`next` by hand, and a comprehension for the rest."""
    steps = t.steps()
    while (step := next(steps, None)) is not None and step < 2:
        t.step()
    if step is not None:
        t.step()
    [t.step() for _ in steps]


def committed(t: Training) -> None:
    """A loop over `while` that decides by what it has logged, and keeps going after an exception."""
    with loop.begin(state=t.state, output_dir=t.folder / "loop") as run:
        while len(t.logged) < STEPS:
            try:
                t.step()
                int("x" if run.step == 2 else "1")
            except ValueError:
                t.logged[-1] = 0.0
            run.commit()


def saved(t: Training) -> None:
    """The script also saves by itself, and reads what it has saved."""
    for step in t.steps(save_every=2, save_total_limit=1):
        t.step()
        if step % 2 == 0 and os.environ.get("RANK", "0") == "0":
            torch.save(t.plain.state_dict(), t.folder / "own.pt")
            t.logged.append(float(sum(value.sum() for value in torch.load(t.folder / "own.pt").values())))
