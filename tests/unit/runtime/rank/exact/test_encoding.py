"""Encoded values decode to equal values; unsupported values and unknown tags are rejected."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact.encoding import Decoder, Encoder, UnsupportedValueError, encode

CPU = torch.device("cpu")


def round_trip(value: Any) -> Any:
    """Encode a value, convert it to JSON text and back, and decode it."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, "value"))
    return Decoder(tensors, CPU, "file")(json.loads(text))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.complex_numbers(allow_nan=False),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers() | st.just("@"), inner)
        ),
    )
)
def test_plain_values_are_unchanged(value: Any) -> None:
    """Holds for any nesting, and for keys that look like tags."""
    assert round_trip(value) == value


def test_container_types_and_special_floats_are_unchanged() -> None:
    """Tuples stay tuples, deques keep their maximum length, NaN and infinities stay, and arrays stay arrays;
    a numpy scalar becomes a Python number.
    """
    found = round_trip(
        {
            "a": (1, [2.5]),
            "b": deque([1, 2], maxlen=4),
            "s": [{1, 2}, frozenset("x")],
            "c": [math.nan, math.inf, -math.inf],
            "array": np.arange(3, dtype=np.uint32),
            "number": np.float64(0.1),
        }
    )
    assert found["a"] == (1, [2.5])
    assert isinstance(found["b"], deque)
    assert (list(found["b"]), found["b"].maxlen) == ([1, 2], 4)
    assert math.isnan(found["c"][0])
    assert found["c"][1:] == [math.inf, -math.inf]
    assert (found["array"].dtype, found["array"].tolist(), found["number"]) == (np.uint32, [0, 1, 2], 0.1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_are_unchanged(dtype: torch.dtype) -> None:
    """Type, shape and bits are equal, for empty tensors and scalars too."""
    for tensor in (
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.tensor(1).to(dtype),
        torch.zeros(0, 2).to(dtype),
    ):
        found = round_trip([tensor])[0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_a_tensor_is_decoded_to_its_device() -> None:
    """A CPU tensor stays on the CPU; any other goes to the device of this rank."""
    tensors: dict[str, torch.Tensor] = {}
    on_cpu = encode(torch.ones(2), tensors, "value")
    on_device = {**encode(torch.ones(2), tensors, "value"), "device": "cuda"}
    cpu_tensor, device_tensor = Decoder(tensors, torch.device("meta"), "file")([on_cpu, on_device])
    assert (cpu_tensor.device.type, device_tensor.device.type) == ("cpu", "meta")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\] is a object"),
        ({"s": {object()}}, r"an item of value\['s'\] is a object"),
    ],
)
def test_an_unsupported_value_is_named(value: Any, place: str) -> None:
    """The error gives its place in the container and its type."""
    with pytest.raises(UnsupportedValueError, match=place):
        encode(value, {}, "value")


@pytest.mark.parametrize(
    "tagged",
    [
        {"@": "tensor", "name": "t9", "device": "cpu"},
        {"@": "tensor"},
        {"@": "tuple"},
        {"@": "tuple", "items": 5},
        {"@": "deque", "items": [], "maxlen": "x"},
        {"@": "dict", "items": [[1]]},
        {"@": "dict", "items": [[[], 1]]},
        {"@": "os.system"},
        {"@": ["unhashable"]},
    ],
)
def test_an_invalid_tag_is_rejected(tagged: Any) -> None:
    """Only the listed types are created, and no code is executed."""
    with pytest.raises(CheckpointError, match="the file contains an invalid value"):
        Decoder({}, CPU, "the file")([tagged])


def test_an_encoder_warns_about_an_unsupported_value_and_saves_none() -> None:
    """The warning names the value and its type; other values are encoded."""
    warned: list[str] = []
    encoder = Encoder(warned.append)
    assert encoder({"client": object()}, "the state of reward count") is None
    assert encoder([1], "numbers") == [1]
    assert len(warned) == 1
    assert warned[0].startswith(
        "the state of reward count['client'] is a object, which checkpoints cannot hold"
    )
