"""Change transformers' `generate` during a trainer's turn: add a criterion, divide it into parts.

`install` wraps `GenerationMixin.generate` once. `with_criteria` says for which block a criterion is added to
those that the script passes, and `in_parts` for which block a call is divided; each part then has a criterion
of its own. Only the outermost call in this thread is changed: a model that a tool or a reward uses, or an
assistant model inside the call, generates as ever. Rows keep their padding, so greedy decoding generates
the same tokens; parts that sample draw other random numbers than the whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from transformers import GenerationMixin

ROWS = frozenset({"inputs", "input_ids", "attention_mask", "token_type_ids", "position_ids"})
"""Tensors with one row for each prompt. Any other, as images have, makes a call that is not divided."""
KEYWORDS = "kwargs"


def divided(arguments: Mapping[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Return the arguments of each part, in the order of the rows; None if the call cannot be divided.

    Parts differ by one row at most.

    Args:
        arguments: of the call, by parameter of `generate`; its keywords as `kwargs`.
        count: parts, at most one for each row.
    """
    keywords = arguments.get(KEYWORDS, {})
    tensors = {
        name: value
        for name, value in (*arguments.items(), *keywords.items())
        if isinstance(value, torch.Tensor)
    }
    prompts = tensors.get("input_ids", tensors.get("inputs"))
    if prompts is None or not tensors.keys() <= ROWS:
        return None
    rows = len(prompts)
    if any(len(value) != rows for value in tensors.values()):
        return None
    count = min(count, rows)
    if count < 2:
        return None
    split = {name: torch.tensor_split(value, count) for name, value in tensors.items()}

    def part(values: Mapping[str, Any], number: int) -> dict[str, Any]:
        return {name: split[name][number] if name in split else value for name, value in values.items()}

    parts = [part(arguments, number) for number in range(count)]
    for number, one in enumerate(parts):
        if KEYWORDS in one:
            one[KEYWORDS] = part(keywords, number)
    return parts


def joined(results: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return the rows of all parts, filled up to the longest as `generate` fills up a row that has ended.

    Args:
        results: prompt and completion of each row, of each part.
        arguments: of one part.
    """
    configuration = arguments.get("generation_config") or arguments["self"].generation_config
    padding = getattr(configuration, "pad_token_id", None)
    if padding is None:  # as `generate` chooses it
        end = configuration.eos_token_id
        padding = end[0] if isinstance(end, (list, tuple)) else (end or 0)
    longest = max(result.shape[1] for result in results)
    return torch.cat(
        [
            torch.nn.functional.pad(result, (0, longest - result.shape[1]), value=int(padding))
            for result in results
        ]
    )


class Parts:
    """Into how many parts the calls of a block are divided.

    Attributes:
        calls: calls of `generate` in the block.
        whole: calls that could not be divided.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls = 0
        self.whole = 0


AddCriteria = Callable[[dict[str, Any], bool], None]
"""Adds a criterion to the arguments of a call of `generate`, or of one part of a call, which the second value
says."""
Value = TypeVar("Value")
_INSTALLED = "_grpo_run_generate"
_criteria: ContextVar[AddCriteria | None] = ContextVar("grpo_run_criteria", default=None)
_parts: ContextVar[Parts | None] = ContextVar("grpo_run_parts", default=None)


@contextmanager
def _bound(variable: ContextVar[Value | None], value: Value | None) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def with_criteria(add: AddCriteria) -> AbstractContextManager[None]:
    """Add criteria to the next call of `generate` in the block."""
    return _bound(_criteria, add)


@contextmanager
def in_parts(count: int) -> Iterator[Parts]:
    """Divide each outermost call of `generate` in the block into parts; yields what came of it.

    Args:
        count: parts, at most one for each row.
    """
    parts = Parts(count)
    with _bound(_parts, parts):
        yield parts


def install() -> None:
    """Let transformers' `generate` look for criteria and for parts. A second call has no effect.

    It stays: a script may keep the method in a function of its own, which would then be another one than that
        of the class.
    """
    original = GenerationMixin.generate
    if getattr(original, _INSTALLED, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        add, parts = _criteria.get(), _parts.get()
        if add is None and parts is None:
            return original(self, *args, **kwargs)
        call = signature.bind_partial(self, *args, **kwargs)
        with _bound(_criteria, None), _bound(_parts, None):
            return _generate(original, call, add, parts)

    setattr(generate, _INSTALLED, True)
    GenerationMixin.generate = generate


def _generate(
    original: Callable[..., Any], call: inspect.BoundArguments, add: AddCriteria | None, parts: Parts | None
) -> Any:
    """Generate, in one call or in parts, each with its criterion."""
    calls = [call.arguments]
    if parts is not None:
        parts.calls += 1
        calls = divided(call.arguments, parts.count) or calls
        parts.whole += len(calls) == 1 and parts.count > 1
    results = []
    for arguments in calls:
        if add is not None:
            add(arguments, len(calls) > 1)
        call.arguments = arguments
        results.append(original(*call.args, **call.kwargs))
    return results[0] if len(results) == 1 else joined(results, calls[0])
