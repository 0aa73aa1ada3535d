"""Seeds for what a server samples, so that one that is started again, or has served others meanwhile, samples
what it would have sampled otherwise: without a seed, it draws from a generator of its own.

A seed is made of the script's seed, the state of torch's generator, which a recovery restores and fresh
seeds of a learning guard change, the call, the step and the number of the prompt among those of the step.
It is left to the script if `generation_kwargs` has one. TRL sends all prompts in one request, for which
vLLM takes one seed: it gives each of a prompt's samples another, and the same ones to each prompt. That
does no harm where the samples of a group have one prompt. Where each has its own, as between calls of
tools, samples of a group would be alike, so each prompt is then sent in a request of its own, as TRL sends
conversations. Used by `_custody.py` on rank 0.
"""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo_run.runtime.upstream import vllm_names

SEED, KEYWORDS = "seed", "generation_kwargs"
CONCURRENT = 256
"""Requests at once; vLLM runs as many sequences by default. TRL keeps 64 connections."""


class Seeds:
    """The seeds of one trainer's requests.

    Args:
        train_call: number of the call in the run.
    """

    def __init__(self, trainer: Any, train_call: int) -> None:
        self._trainer = trainer
        self._train_call = train_call
        self._taken: Counter[tuple[int, bool]] = Counter()

    def remembered(self) -> Callable[[], None]:
        """Return a function by which the same seeds are taken again from here on."""
        taken = self._taken.copy()

        def restore() -> None:
            self._taken = taken.copy()

        return restore

    def send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Send what a method of TRL's client sends, with seeds."""
        call = inspect.signature(original).bind(*args, **kwargs).arguments
        given = call.get(KEYWORDS) or {}
        if SEED in given:
            return original(*args, **kwargs)
        by_row = [name for name in vllm_names.ROWS if call.get(name) is not None]
        rows = call[by_row[0]]

        def send(place: slice, seed: int) -> Any:
            part = {name: call[name][place] for name in by_row}
            return original(**{**call, **part, KEYWORDS: {**given, SEED: seed}})

        if len(rows) <= 1 or (call.get("n", 1) > 1 and _are_different(rows)):
            return send(slice(None), self._take())
        places = [slice(row, row + 1) for row in range(len(rows))]
        seeds = [self._take() for _ in rows]
        with ThreadPoolExecutor(min(len(rows), CONCURRENT)) as threads:
            return _joined(list(threads.map(send, places, seeds)))

    def _take(self) -> int:
        place = (int(self._trainer.state.global_step), bool(self._trainer.model.training))
        drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        parts = (self._trainer.args.seed, drawn, self._train_call, *place, self._taken[place])
        if place not in self._taken:
            self._taken = Counter({key: count for key, count in self._taken.items() if key[0] == place[0]})
        self._taken[place] += 1
        return zlib.crc32(repr(parts).encode())


def _are_different(rows: Sequence[Any]) -> bool:
    return len({repr(row) for row in rows}) == len(rows)


def _joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer to one request for all rows; None for what none has."""
    return {
        name: None if value is None else [one for answer in answers for one in answer[name]]
        for name, value in answers[0].items()
    }
