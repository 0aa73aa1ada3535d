"""Whether a checkpoint is of the model that the script has built."""

from __future__ import annotations

import pytest

from grpo_run.runtime.checkpoints.completeness import Tensor
from grpo_run.runtime.checkpoints.model_shape import NamedShape, difference, model_shape

MODEL: tuple[NamedShape, ...] = (("embed.weight", (40, 16), "float32"), ("head.weight", (16, 40), "float32"))


def test_the_order_of_parameters_does_not_matter() -> None:
    """Nor whether a shape is a tuple or torch's own."""
    assert model_shape(MODEL) == model_shape(
        [(name, list(shape), dtype) for name, shape, dtype in MODEL[::-1]]
    )


@pytest.mark.parametrize(
    "other",
    [
        ("head.weight", (16, 41), "float32"),
        ("tail.weight", (16, 40), "float32"),
        ("head.weight", (16, 40), "bfloat16"),
    ],
)
def test_name_shape_and_type_matter(other: NamedShape) -> None:
    """Each of the three."""
    assert model_shape([MODEL[0], other]) != model_shape(MODEL)
    assert model_shape(MODEL[:1]) != model_shape(MODEL)


def saved(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    return {name.replace("_", "."): Tensor(dtype="F32", shape=shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (saved(embed_weight=(50, 16)), "embed.weight is [50, 16] there and [40, 16] here"),
        (saved(embed_weight=(40, 16), head_weight=(16, 40), lora_a=(1,)), "lora.a is only there"),
        (saved(embed_weight=(40, 16)), "head.weight is only here"),
        (saved(embed_weight=(40, 16), head_weight=(16, 40)), "names or types"),
        ({}, "names or types"),
    ],
)
def test_the_difference_is_named(there: dict[str, Tensor], said: str) -> None:
    """The plainest first; where nothing can be compared, that is what is said."""
    assert said in difference(MODEL, there)


def test_a_long_difference_is_cut() -> None:
    """Three, and how many more."""
    many = {f"layer.{index}": Tensor(dtype="F32", shape=(1,)) for index in range(10)}
    text = difference([], many)
    assert text.count("only there") == 3
    assert text.endswith("and 7 more")
