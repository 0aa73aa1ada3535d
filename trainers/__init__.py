"""Code that runs inside a rank: the bootstrap that runs the user's script, and the guard of its Trainers.

May import `runtime` and `watchdog`. Start reading at `bootstrap.py`, then `hooks/attach.py` and
`hooks/train_call.py`. Layers, top first: `preload`, `bootstrap`, `recipes`, `consensus` and `loop`; `hooks` and `loops`; `calls`;
`exclusion`, `quarantine`, `rewards`, `saving` and `unguarded`; `resuming`; `loading`; `capture`; `exact`; `caps` and `learning`;
`rank`; `async_functions`, `inherited`, `patches` and `upstream`. Importing this package imports neither torch nor TRL.
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
    from grpo_run.trainers.hooks.attach import guard as attach

    return attach(trainer)
