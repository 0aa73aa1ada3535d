"""Divide a call of transformers' `generate` into calls of fewer rows, and join what they return.

Rows keep their padding, so greedy decoding generates the same tokens. Parts that sample draw other random numbers than the whole.
Called by `generation.py`. Does not generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
