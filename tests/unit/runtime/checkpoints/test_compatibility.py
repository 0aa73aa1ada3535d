"""Compatibility of a checkpoint with a run: world size, batch and model shape."""

from __future__ import annotations

import pytest
from support.transcripts import Story, stories

from grpo_run.runtime.checkpoints.compatibility import (
    BatchGeometry,
    NamedShape,
    SavedTensor,
    describe_model_difference,
    digest_model_shape,
    explain_world_size_mismatch,
)

MODEL: tuple[NamedShape, ...] = (("embed.weight", (40, 16), "float32"), ("head.weight", (16, 40), "float32"))


class CompatibilityShell:
    """A checkpoint and a run that may load it."""

    def fits(
        self, now: str, written: str, *, ranks: str = "1", written_by: str = "2", layout: str = "ddp"
    ) -> str:
        """Whether checkpoint-40 fits, or why not."""
        batches = [batch_of(text) for text in (written, now)]
        said = explain_world_size_mismatch(
            "checkpoint-40", written_by=int(written_by), layout=layout or None, written_batch=batches[0],
            current_batch=batches[1], ranks=int(ranks),
        )  # fmt: skip
        return said or "fits"

    def differs(self, *tensors: str) -> str:
        """What differs between these tensors and the model."""
        shapes = dict(one.split(":") for one in tensors)
        return describe_model_difference(
            MODEL, {name: tensor(*map(int, shape.split(","))) for name, shape in shapes.items()}
        )

    def extra(self, count: str) -> str:
        """What differs if the checkpoint has so many tensors and the model none."""
        return describe_model_difference([], {f"layer.{index}": tensor(1) for index in range(int(count))})


def batch_of(text: str) -> BatchGeometry | None:
    """A batch of a story."""
    if not text:
        return None
    ranks, each, accumulation = map(int, text.split("x"))
    return BatchGeometry(ranks=ranks, per_device=each, accumulation=accumulation)


def tensor(*shape: int) -> SavedTensor:
    """A tensor of a checkpoint."""
    return SavedTensor(dtype="F32", shape=shape)


@stories(__file__, "compatibility.txt")
def test_compatibility(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(CompatibilityShell(), word)


def test_the_shape_digest_does_not_depend_on_the_order_of_parameters() -> None:
    """Shapes may be tuples or lists."""
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
def test_the_shape_digest_covers_names_shapes_and_types(other: NamedShape) -> None:
    """A change of any of them changes the digest, and so does a missing parameter."""
    assert digest_model_shape([MODEL[0], other]) != digest_model_shape(MODEL)
    assert digest_model_shape(MODEL[:1]) != digest_model_shape(MODEL)
