"""Put back what a rollout, or a part of it, has changed, so that it can be made again.

Called by `_custody.py`. What a script's own functions remember is not put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from grpo_run.runtime.rank.generators import read_generators, write_generators
from grpo_run.runtime.upstream import trainer_names

TOKENS_SEEN = "num_input_tokens_seen"


def remembered(trainer: Any) -> Callable[[], None]:
    """Remember what a rollout changes: what was logged of rollouts so far, and the random generators. Return
    a function that puts it back, so that what is made again logs nothing twice, and what is drawn later does
    not depend on how often it was made.
    """
    generators = read_generators()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    state = getattr(trainer, "state", None)
    tokens = getattr(state, TOKENS_SEEN, None)
    present = [getattr(trainer, name, None) for name in trainer_names.TABLES]
    tables = [(table, _copied(table)) for table in present if table is not None]

    def restore() -> None:
        write_generators(generators)
        if device is not None:
            torch.cuda.set_rng_state(device)
        if tokens is not None:
            setattr(state, TOKENS_SEEN, tokens)
        for table, kept in tables:
            _put_back(table, kept)

    return restore


def _copied(table: Any) -> dict[Any, Any]:
    return {
        key: _copied(value) if isinstance(value, dict)
        else list(value) if isinstance(value, (list, deque))
        else value
        for key, value in table.items()
    }  # fmt: skip


def _put_back(table: Any, kept: dict[Any, Any]) -> None:
    """Give a table its content again; containers keep their types and maximum lengths."""
    for key in table.keys() - kept.keys():
        del table[key]
    for key, value in kept.items():
        if isinstance(value, dict) and key in table:
            _put_back(table[key], value)
        elif isinstance(value, list) and isinstance(table.get(key), (list, deque)):
            table[key].clear()
            table[key].extend(value)
        else:
            table[key] = value
