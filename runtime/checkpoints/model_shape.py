"""Whether a checkpoint is of the model that the script has built, before a byte of it is loaded.

Transformers loads weights with missing names let pass, so another model may load in part and train on. Called by
the guard: when it saves, for the manifest, and when it resumes. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from blake3 import blake3

from grpo_run.runtime.checkpoints.completeness import Tensor

NamedShape = tuple[str, Sequence[int], str]
"""A parameter's name, shape and type (`float32`)."""
_SHOWN = 3


def model_shape(named_shapes: Iterable[NamedShape]) -> str:
    """A digest over every parameter's name, shape and type, in the order of the names."""
    rows = sorted([name, [int(length) for length in shape], dtype] for name, shape, dtype in named_shapes)
    return blake3(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def difference(named_shapes: Iterable[NamedShape], saved: Mapping[str, Tensor]) -> str:
    """In words, how a model differs from saved weights whose digest is another.

    Args:
        named_shapes: the model's parameters.
        saved: what `parts.tensors` found; may leave out tied weights, or be empty where state is cut over ranks.
    """
    mine = {name: tuple(int(length) for length in shape) for name, shape, _ in named_shapes}
    reshaped = [
        f"{name} is {list(saved[name].shape)} there and {list(shape)} here"
        for name, shape in sorted(mine.items())
        if name in saved and saved[name].shape != shape
    ]
    if reshaped:
        return _some(reshaped)
    extra = [f"{name} is only there" for name in sorted(set(saved) - set(mine))]
    if extra:
        return _some(extra)
    lacking = [f"{name} is only here" for name in sorted(set(mine) - set(saved))] if saved else []
    return _some(lacking) if lacking else "names or types of its parameters differ"


def _some(phrases: Sequence[str]) -> str:
    more = len(phrases) - _SHOWN
    return ", ".join(phrases[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
