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

from typing import TYPE_CHECKING, Any

from grpo_run.runtime.rank.rollouts.deadline import Deadline
from grpo_run.watchdog.observation import EndReason

if TYPE_CHECKING:
    from grpo_run.runtime.rank.rollouts.capping import apply
    from grpo_run.runtime.rank.rollouts.criteria import Repetition

__all__ = ["Deadline", "EndReason", "Repetition", "apply"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used."""
    if name == "Repetition":
        from grpo_run.runtime.rank.rollouts.criteria import Repetition

        return Repetition
    if name == "apply":
        from grpo_run.runtime.rank.rollouts.capping import apply

        return apply
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
