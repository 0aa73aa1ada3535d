"""What users' scripts import: loops, limits of generation, consensus, reward marks, and packaged recipes.

`loop.py` is for hand-written training loops, `caps.py` for limits on generation, `consensus.py` for
decisions of all ranks, `rewards.py` for reward functions, and `recipes/` has the scripts of
`grpo-run train`, which share `memory_settings.py` with `memgen/`. `guard` checks early that a trainer can be
guarded. Each module is a thin front; the implementation is in `runtime/rank/`. May import `runtime/` and
`watchdog/`. Importing this package imports neither torch nor TRL.
"""

from __future__ import annotations

from typing import Any

__all__ = ["guard"]


def guard(trainer: Any) -> Any:
    """Check now that a trainer can be guarded, instead of at its `train()` call, and return the trainer.

    Optional: under `grpo-run launch` every `transformers.Trainer` is guarded. Outside it, this changes
    nothing, so a script may always call it.

    Raises:
        ConfigError: the trainer cannot be guarded, or a setting of the run did not take effect on it.
    """
    from grpo_run.runtime.rank.hooks.attach import guard as attach

    return attach(trainer)
