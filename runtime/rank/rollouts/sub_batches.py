"""Generate the rollouts of one trainer in parts, as the memory plan requires.

`runtime/rank/hooks/rollout_hooks.py` enters `in_sub_batches` for the length of a `train()` call, inside the caps. Every rank makes as many calls
of `generate` as every other: where parameters are sharded, each call gathers them on all ranks, so turns with tools, which
not every rank has, are not divided there. Does not divide what vLLM or a script's own function generates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_run.runtime.rank.rollouts import generate_calls
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import override_attributes

NOT_DIVIDED = (
    "the memory plan divides generation into {count} parts, but the model's input has images, or it does not generate with"
    " transformers' `generate`: it is generated in one part"
)


@contextmanager
def in_sub_batches(trainer: Any, count: int, *, sharded: bool, warn: Callable[[str], None]) -> Iterator[None]:
    """Divide the calls of generation of a trainer for the length of the block.

    Args:
        count: parts of a call; 1 changes nothing.
        sharded: a call of `generate` is collective.
        warn: called once with a line if calls cannot be divided.
    """
    original = getattr(trainer, trainer_names.SINGLE_TURN, None)
    whole = getattr(trainer, "use_vllm", False) or (sharded and getattr(trainer, "tools", None))
    if count < 2 or original is None or whole:
        yield
        return
    generate_calls.install()
    warn_once = functools.cache(warn)

    @functools.wraps(original)
    def single_turn(*args: Any, **kwargs: Any) -> Any:
        with generate_calls.in_parts(count) as parts:
            result = original(*args, **kwargs)
        completions = result[0] if isinstance(result, tuple) else result
        if len(completions) > 1 and parts.whole == parts.calls:
            warn_once(NOT_DIVIDED.format(count=count))
        return result

    with override_attributes(trainer, **{trainer_names.SINGLE_TURN: single_turn}):
        yield
