"""Loops with odd models and optimizers: accumulated, averaged, compiled, scaled, shared and adversarial."""

from __future__ import annotations

import copy
from typing import Any

import torch

from grpo_run.trainers import loop
from odd_loop_kinds.training import STEPS, WIDTH, Training


def accumulated(t: Training) -> None:
    """Several backward passes in one step, without synchronization but for the last."""
    for _ in t.steps():
        t.optimizer.zero_grad(set_to_none=False)
        for micro in range(3):
            if t.ddp and micro < 2:
                with t.model.no_sync():
                    (t.loss() / 3).backward()
            else:
                (t.loss() / 3).backward()
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.logged.append(float(norm))


def schedulers(t: Training) -> None:
    """Schedulers of several kinds, one of them with a function."""
    warm = torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda step: (step + 1) / 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, STEPS)
    sequence = torch.optim.lr_scheduler.SequentialLR(t.optimizer, [warm, cosine], [3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=1)
    t.state |= {"sequence": sequence, "plateau": plateau}
    for _ in t.steps():
        t.step()
        sequence.step()
        plateau.step(t.logged[-1])
        t.logged.append(t.optimizer.param_groups[0]["lr"])


def averaged(t: Training) -> None:
    """An average of the weights, and a copy that follows."""
    ema = torch.optim.swa_utils.AveragedModel(
        t.plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    target = copy.deepcopy(t.plain).requires_grad_(False)
    t.state |= {"ema": ema, "target": target}
    for _ in t.steps():
        t.step()
        ema.update_parameters(t.plain)
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), t.plain.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        t.logged.append([float(ema(torch.ones(1, WIDTH)).sum()), float(target(torch.ones(1, WIDTH)).sum())])


def compiled(t: Training) -> None:
    """A compiled model in the state, beside the one that it was compiled from."""
    t.model = torch.compile(t.model, backend="aot_eager")
    t.state["model"] = t.model
    for _ in t.steps():
        t.step()


def compiled_in_place(t: Training) -> None:
    """A model that compiles itself."""
    t.plain.compile(backend="aot_eager")
    for _ in t.steps():
        t.step()


def scaled(t: Training) -> None:
    """Mixed precision with a gradient scaler that skips steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    t.state["scaler"] = scaler
    for step in t.steps():
        t.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = t.loss()
        scaled = scaler.scale(loss * (float("inf") if step in (0, 4) else 1.0))
        scaled.backward()
        scaler.unscale_(t.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
        scaler.step(t.optimizer)
        scaler.update()
        loop.log({"loss": loss, "grad_norm": norm})
        t.logged.append([loss.item(), scaler.get_scale()])


def shared(t: Training) -> None:
    """Objects that occur twice: a model, a part of it, tied weights, and one list under two names."""
    t.plain[3].weight = torch.nn.Parameter(t.plain[0].weight.T.clone())
    t.plain[0].register_parameter("also", t.plain[3].weight)
    t.optimizer = torch.optim.AdamW(t.plain.parameters(), lr=0.05)
    t.model = t.plain
    t.state |= {
        "model": t.plain, "again": t.plain, "head": t.plain[3], "optimizer": t.optimizer,
        "copy of logged": t.logged,
        "nested": {"logged": t.logged},
    }  # fmt: skip
    for _ in t.steps():
        t.step()


def adversaries(t: Training) -> None:
    """Two optimizers in turn, one of them with a closure, and a group of parameters that is added later."""
    other = torch.nn.Linear(WIDTH, 1)
    lbfgs = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3)
    t.state |= {"other": other, "lbfgs": lbfgs}
    for step in t.steps():
        if step % 2:
            t.step()
            continue
        batch = torch.randn(4, WIDTH)

        def closure(batch: torch.Tensor = batch) -> Any:
            lbfgs.zero_grad()
            loss = other(batch).square().mean()
            loss.backward()
            return loss

        t.logged.append(float(lbfgs.step(closure)))
