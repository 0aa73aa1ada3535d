"""Keep the samples of an optimizer step where a run over a range of hosts has fewer than it may have.

The batch of `--nnodes 2:3` is that of three hosts. With two, `gradient_accumulation_steps` is larger by the
same factor: every step takes the same samples, and the update is the same up to the order of its sums and
the random numbers of dropout. Where it would be another one, the run waits for all hosts: completions are
drawn by each rank for itself, and the last step of an epoch takes the samples that are left. Called by
`attach.py` where a trainer is checked, before anything is derived from the steps.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from grpo_run.runtime.errors import HostsMissingError
from grpo_run.runtime.memory.script_settings import record_of, settings_of
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream.trainer_kinds import generates_rollouts

_KEPT = "_grpo_run_fewer_hosts"
"""Attribute of a trainer whose steps have been changed."""


def keep_batch(session: Session, trainer: Any) -> None:
    """Let a trainer accumulate gradients for hosts that are away.

    Raises:
        HostsMissingError: another update would follow.
    """
    full, here, args = session.settings.full_world_size, session.world_size, trainer.args
    if full in (0, here) or _KEPT in vars(trainer):
        return
    before = args.gradient_accumulation_steps
    if why := _why_not(trainer, full, here):
        raise HostsMissingError(f"cannot continue with {here} of {full} ranks: {why}; waiting for all hosts")
    vars(trainer)[_KEPT] = True
    record_of(args).keep(args)  # what the script has set stays known
    steps = args.gradient_accumulation_steps = before * full // here
    session.warn(
        f"{here} of {full} ranks: gradient_accumulation_steps is {steps} instead of {before}, so that every"
        " step takes the same samples"
    )


def _why_not(trainer: Any, full: int, here: int) -> str:
    """Return why the update would be another one, as a clause; empty if it would not."""
    args, data = trainer.args, getattr(trainer, "train_dataset", None)
    steps = args.gradient_accumulation_steps
    samples = args.per_device_train_batch_size * steps * full
    if generates_rollouts(trainer):
        return "each rank draws its own completions"
    if sizes := ", ".join(settings_of(args)["explicit_sizes"]):
        return f"the batch is also set by {sizes}"
    if steps * full % here:
        return f"gradient_accumulation_steps {steps} x {full} ranks cannot be divided among {here}"
    if not isinstance(data, Sized) or len(data) % samples:
        return f"an epoch is not known to be a multiple of the {samples} samples of a step"
    return ""
