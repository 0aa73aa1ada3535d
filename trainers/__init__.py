"""What lives in a rank: the bootstrap that runs the user's script, and the guard on its Trainers.

`guard(trainer)` may be called in a script that wants to say so; under `grpo-run launch` every
`transformers.Trainer` is guarded without it. Importing this package imports neither torch nor TRL.
"""

from __future__ import annotations

from typing import Any

__all__ = ["guard"]


def guard(trainer: Any) -> Any:
    """Put the guard on a trainer now instead of at its `train()` call, and return the trainer.

    Outside `grpo-run launch` it changes nothing, so a script may call it always.
    """
    from grpo_run.trainers.hooks.attach import guard as attach

    return attach(trainer)
