"""Whether a checkpoint is of the model that the script has built."""

from __future__ import annotations

import pytest

from grpo_run.runtime.checkpoints.compatibility import (
    NamedShape,
    SavedTensor,
    describe_model_difference,
    digest_model_shape,
)

MODEL: tuple[NamedShape, ...] = (("embed.weight", (40, 16), "float32"), ("head.weight", (16, 40), "float32"))


def test_the_order_of_parameters_does_not_matter() -> None:
    """Nor whether a shape is a tuple or torch's own."""
    assert digest_model_shape(MODEL) == digest_model_shape(
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
    assert digest_model_shape([MODEL[0], other]) != digest_model_shape(MODEL)
    assert digest_model_shape(MODEL[:1]) != digest_model_shape(MODEL)


def saved(**shapes: tuple[int, ...]) -> dict[str, SavedTensor]:
    """What a checkpoint holds."""
    return {name.replace("_", "."): SavedTensor(dtype="F32", shape=shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            saved(embed_weight=(50, 16)),
            "embed.weight has shape [50, 16] in the checkpoint and [40, 16] in the model",
        ),
        (saved(embed_weight=(40, 16), head_weight=(16, 40), lora_a=(1,)), "lora.a is only in the checkpoint"),
        (saved(embed_weight=(40, 16)), "head.weight is only in the model"),
        (saved(embed_weight=(40, 16), head_weight=(16, 40)), "names or types"),
        ({}, "names or types"),
    ],
)
def test_the_difference_is_named(there: dict[str, SavedTensor], said: str) -> None:
    """The plainest first; where nothing can be compared, that is what is said."""
    assert said in describe_model_difference(MODEL, there)


def test_a_long_difference_is_cut() -> None:
    """Three, and how many more."""
    many = {f"layer.{index}": SavedTensor(dtype="F32", shape=(1,)) for index in range(10)}
    text = describe_model_difference([], many)
    assert text.count("only in the checkpoint") == 3
    assert text.endswith("and 7 more")
