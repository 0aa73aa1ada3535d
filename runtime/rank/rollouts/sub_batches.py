"""Generate the rollouts of one trainer in parts, as the memory plan requires.

`runtime/rank/hooks/_rollout_hooks.py` puts the handler around each turn of generation, inside the caps. Every
rank makes as many calls of `generate` as every other: where parameters are sharded, each call gathers them
on all ranks, so turns with tools, which not every rank has, are not divided there. Does not divide what vLLM
or a script's own function generates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.runtime.upstream.patches import Handler

NOT_DIVIDED = (
    "the memory plan divides generation into {count} parts, but the model's input has images, or it does not"
    " generate with transformers' `generate`: it is generated in one part"
)


def in_sub_batches(trainer: Any, count: int, *, sharded: bool, warn: Callable[[str], None]) -> Handler | None:
    """Return a handler that divides the calls of `generate` in a turn; None if they stay whole.

    Args:
        count: parts of a call; 1 changes nothing.
        sharded: a call of `generate` is collective.
        warn: called once with a line if calls cannot be divided.
    """
    if count < 2 or getattr(trainer, "use_vllm", False) or (sharded and getattr(trainer, "tools", None)):
        return None
    generate_calls.install()
    warn_once = functools.cache(warn)

    def divide_generation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate a turn in parts."""
        with generate_calls.in_parts(count) as parts:
            result = original(*args, **kwargs)
        completions = result[0] if isinstance(result, tuple) else result
        if len(completions) > 1 and parts.whole == parts.calls:
            warn_once(NOT_DIVIDED.format(count=count))
        return result

    return divide_generation
