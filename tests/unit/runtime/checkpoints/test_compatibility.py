"""Compatibility of a checkpoint with a run: world size, batch and model shape."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.checkpoints.compatibility import (
    BatchGeometry,
    NamedShape,
    SavedTensor,
    describe_model_difference,
    digest_model_shape,
    explain_world_size_mismatch,
)

EIGHT = BatchGeometry(ranks=2, per_device=4, accumulation=1)


def explain(**changes: Any) -> str | None:
    """The result for checkpoint-40, written by two ranks, in a run of one rank."""
    fields: dict[str, Any] = {
        "written_by": 2, "layout": "ddp", "written_batch": EIGHT,
        "current_batch": BatchGeometry(ranks=1, per_device=4, accumulation=1), "ranks": 1,
    }  # fmt: skip
    return explain_world_size_mismatch("checkpoint-40", **(fields | changes))


def test_a_mismatch_names_every_setting_that_fits() -> None:
    """The message names the batch size, the accumulation steps and the number of ranks."""
    assert (
        explain() == "checkpoint-40 was written with 2 ranks x per_device_train_batch_size 4 x"
        " gradient_accumulation_steps 1 = 8 samples per optimizer step, but this run has 1 rank x"
        " per_device_train_batch_size 4 x gradient_accumulation_steps 1 = 4 samples per optimizer step:"
        " set per_device_train_batch_size=8 or gradient_accumulation_steps=2, or start 2 ranks"
    )


@pytest.mark.parametrize("layout", ["ddp", None])
def test_replicated_state_loads_at_another_world_size_with_the_same_batch(layout: str | None) -> None:
    """The batch may be distributed differently over ranks and accumulation steps."""
    for now in (
        BatchGeometry(ranks=1, per_device=8, accumulation=1),
        BatchGeometry(ranks=1, per_device=2, accumulation=4),
    ):
        assert explain(layout=layout, current_batch=now) is None


@pytest.mark.parametrize("layout", ["deepspeed-zero2", "deepspeed-zero3", "fsdp2", "tensor-parallel"])
def test_sharded_state_loads_only_at_its_own_world_size(layout: str) -> None:
    """The batch does not matter; the message names the layout and the number of ranks."""
    text = explain(layout=layout, current_batch=BatchGeometry(ranks=1, per_device=8, accumulation=1))
    assert text is not None
    assert layout in text
    assert text.endswith("start 2 ranks")


@pytest.mark.parametrize("unknown", ["written_batch", "current_batch"])
def test_an_unknown_batch_does_not_fit_another_world_size(unknown: str) -> None:
    """The message names the number of ranks that wrote the checkpoint."""
    assert (explain(**{unknown: None}) or "").endswith("start 2 ranks")


def test_the_same_world_size_always_fits() -> None:
    """Another batch or unknown metadata does not matter."""
    assert explain(ranks=2) is None
    assert explain(ranks=2, layout="fsdp2", written_batch=None) is None


MODEL: tuple[NamedShape, ...] = (("embed.weight", (40, 16), "float32"), ("head.weight", (16, 40), "float32"))


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


def saved_shapes(**shapes: tuple[int, ...]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint with these shapes."""
    return {name.replace("_", "."): SavedTensor(dtype="F32", shape=shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            saved_shapes(embed_weight=(50, 16)),
            "embed.weight has shape [50, 16] in the checkpoint and [40, 16] in the model",
        ),
        (saved_shapes(embed_weight=(39, 16)), "embed.weight has shape [39, 16]"),
        (
            saved_shapes(embed_weight=(40, 16), head_weight=(16, 40), lora_a=(1,)),
            "lora.a is only in the checkpoint",
        ),
        # tied weights may be absent: what is there is compared by shape only
        (saved_shapes(embed_weight=(40, 16)), "head.weight is only in the model"),
        (saved_shapes(embed_weight=(40, 16), head_weight=(16, 40)), "parameter names or types differ"),
        ({}, "parameter names or types differ"),
    ],
)
def test_a_model_difference_names_the_parameter(tensors: dict[str, SavedTensor], message: str) -> None:
    """A changed shape comes first, then extra and missing names; otherwise the message is general."""
    assert describe_model_difference(MODEL, tensors).startswith(message)


@pytest.mark.parametrize(
    ("written", "now", "suggested"),
    [
        ((3, 4, 5), (2, 3, 2), ("set per_device_train_batch_size=15 or gradient_accumulation_steps=10,"
         " or start 10 ranks")),
        ((1, 7, 1), (2, 3, 2), "start 1 rank with the batch it was written with"),
        ((2, 9, 1), (3, 2, 4), ("set gradient_accumulation_steps=3, or start 2 ranks with the batch it was"
         " written with")),
        ((3, 4, 1), (3, 1, 2), ("set per_device_train_batch_size=2 or gradient_accumulation_steps=4,"
         " or start 6 ranks")),
    ],
)  # fmt: skip
def test_only_settings_that_give_the_written_batch_are_suggested(
    written: tuple[int, int, int], now: tuple[int, int, int], suggested: str
) -> None:
    """Each suggestion multiplies out to the samples per step of the checkpoint."""

    def batch(numbers: tuple[int, int, int]) -> BatchGeometry:
        return BatchGeometry(ranks=numbers[0], per_device=numbers[1], accumulation=numbers[2])

    text = explain(
        written_by=written[0], ranks=now[0] + 20, written_batch=batch(written), current_batch=batch(now)
    )
    assert text is not None
    assert text.endswith(suggested)


@pytest.mark.parametrize(
    ("differences", "ending"),
    [(2, "only in the checkpoint"), (3, "only in the checkpoint"), (4, "and 1 more"), (10, "and 7 more")],
)
def test_at_most_three_differences_are_listed(differences: int, ending: str) -> None:
    """The rest is counted, and nothing is counted where nothing is left."""
    saved = {f"layer.{index}": SavedTensor(dtype="F32", shape=(1,)) for index in range(differences)}
    text = describe_model_difference([], saved)
    assert text.endswith(ending)
    assert text.count("only in the checkpoint") == min(differences, 3)
