"""Keep the samples of an optimizer step where a run over a range of hosts has fewer than it may have.

The batch of `--nnodes 2:3` is that of three hosts. With two, `gradient_accumulation_steps` is larger by the
same factor, and `steps_per_generation` with it, so that every step and every rollout takes the same samples
in the same order. The update is the same up to the order of its sums, but for random numbers, which each
rank draws for itself: dropout, and the completions of a rollout. Called by `attach.py` where a trainer is
checked, before anything is derived from the steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_run.runtime.errors import HostsMissingError
from grpo_run.runtime.memory.deepspeed import explicit_sizes
from grpo_run.runtime.memory.script_settings import record_of
from grpo_run.runtime.rank.session import Session

_KEPT = "_grpo_run_fewer_hosts"
"""Attribute of a trainer whose steps have been changed."""


def keep_batch(session: Session, trainer: Any) -> None:
    """Let a trainer accumulate gradients for hosts that are away.

    Raises:
        HostsMissingError: the steps cannot be divided so.
    """
    full, world_size, args = session.settings.full_world_size, session.world_size, trainer.args
    if full in (0, world_size) or _KEPT in vars(trainer):
        return
    vars(trainer)[_KEPT] = True
    record, steps = record_of(args), {}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        if isinstance(value := getattr(args, name, None), int):
            steps[name], rest = divmod(value * full, world_size)
            if rest or any(explicit_sizes(args)):
                raise HostsMissingError(
                    f"cannot continue with {world_size} of {full} ranks: {name} {value} x {full} ranks cannot"
                    f" be divided among {world_size} in the same batch; waiting for all hosts"
                )
    others = {name: getattr(args, name) for name in steps if name != "gradient_accumulation_steps"}
    for name, value in steps.items():
        setattr(args, name, value)
    if others:
        others["generation_batch_size"] = args.generation_batch_size
        args.generation_batch_size = args.generation_batch_size * full // world_size
    replace(record, others={**record.others, **others}).keep(args)
    trainer.accelerator.gradient_accumulation_steps = steps["gradient_accumulation_steps"]
    session.warn(
        f"{world_size} of {full} ranks: gradient_accumulation_steps is {steps['gradient_accumulation_steps']}"
        f" instead of {record.gradient_accumulation_steps}, so that a step takes the same samples; random"
        " numbers (generation, dropout) differ"
    )
