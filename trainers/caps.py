"""Caps on generation: end completions that would not end by themselves, and record why each one ended.

`grpo-run launch --generation` and recipes cap TRL's trainers; `apply` does so from code, also without
`grpo-run launch`. A generation loop that a script writes itself uses the same caps:

    from grpo_run.trainers import caps, consensus

    deadline, repetition = caps.Deadline(60), caps.Repetition(prompt_length=tokens.shape[1])
    for _ in consensus.while_any(lambda: not done.all() and not deadline.passed()):
        tokens, done = step(tokens, done)
        done = done | repetition(tokens)

`Deadline` is a time limit for this rank alone; use `trainers/consensus.py` so that all ranks leave a loop
together. `Repetition` finds completions that repeat themselves. `EndReason` lists why a completion can end.
Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.features import for_scripts
from grpo_run.runtime.rank.rollouts.limits import Deadline, Repetition
from grpo_run.watchdog.observation import EndReason

__all__ = ["Deadline", "EndReason", "Repetition", "apply"]


def apply(trainer: Any, *, repetition: int | None = None, max_time: float | None = None) -> None:
    """Cap a GRPO or RLOO trainer from code, also without `grpo-run launch`. Call it before `train()`.

    A cap that `--generation` sets as well has the value of the command line.

    Args:
        repetition: a completion in a loop is ended when the loop has lasted about so many tokens, at least 8.
        max_time: a rollout is ended after so many seconds.

    Raises:
        ConfigError: a value is out of range, or the trainer's backend cannot apply the cap.
    """
    for_scripts("caps").apply(trainer, repetition=repetition, max_time=max_time)
