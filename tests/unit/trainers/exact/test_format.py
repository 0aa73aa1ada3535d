"""What is written is read back the same, and what was not written here is refused with a clear error."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact import format
from grpo_run.trainers.exact.format import NotPlain, RankState, decode, encode, read, write

CPU = torch.device("cpu")


def through(value: Any) -> Any:
    """Encode, through JSON text, and decode."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, "value"))
    return decode(json.loads(text), tensors, CPU, "file")


def state(**changes: Any) -> RankState:
    return RankState(**({"schema_version": format.SCHEMA, "rank": 0, "world_size": 1, "step": 3} | changes))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers() | st.just("@"), inner)
        ),
    )
)
def test_plain_values_come_back_the_same(value: Any) -> None:
    """Whatever they are nested in, keys that look like tags included."""
    assert through(value) == value


def test_kinds_of_values_survive() -> None:
    """A tuple stays a tuple, a deque keeps its length, NaN and infinities stay."""
    found = through({"a": (1, [2.5]), "b": deque([1, 2], maxlen=4), "c": [math.nan, math.inf, -math.inf]})
    assert found["a"] == (1, [2.5])
    assert isinstance(found["b"], deque)
    assert (list(found["b"]), found["b"].maxlen) == ([1, 2], 4)
    assert math.isnan(found["c"][0])
    assert found["c"][1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_survive_by_bytes(dtype: torch.dtype) -> None:
    """Type, shape and bits, empty ones and single numbers too."""
    for tensor in (
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.tensor(1).to(dtype),
        torch.zeros(0, 2).to(dtype),
    ):
        found = through([tensor])[0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_arrays_and_their_numbers_survive() -> None:
    """An array stays one; a single number of numpy becomes Python's."""
    found = through({"array": np.arange(3, dtype=np.uint32), "number": np.float64(0.1)})
    assert found["array"].dtype == np.uint32
    assert found["array"].tolist() == [0, 1, 2]
    assert found["number"] == 0.1


def test_slices_of_one_tensor_can_be_written(tmp_path: Path) -> None:
    """A rollout's micro-batches share memory, which safetensors alone refuses."""
    whole, tensors = torch.arange(8.0).reshape(4, 2), dict[str, torch.Tensor]()
    encoded = encode([{"x": whole[:2], "n": whole[0, 0]}, {"x": whole[2:], "n": whole[0, 0]}], tensors, "it")
    write(tmp_path, state(buffered_inputs=encoded), tensors)
    found, loaded = read(tmp_path, 0)
    parts = decode(found.buffered_inputs, loaded, CPU, "file")
    assert torch.equal(torch.cat([part["x"] for part in parts]), whole)


def test_a_tensor_goes_where_it_was() -> None:
    """On the device of this rank if it was on one, on the CPU if it was there."""
    tensors: dict[str, torch.Tensor] = {}
    on_cpu = encode(torch.ones(2), tensors, "it")
    on_device = {**encode(torch.ones(2), tensors, "it"), "device": "cuda"}
    here, there = decode([on_cpu, on_device], tensors, torch.device("meta"), "file")
    assert (here.device.type, there.device.type) == ("cpu", "meta")


@pytest.mark.parametrize(
    ("value", "place"),
    [({"a": [1, object()]}, r"it\['a'\]\[1\] is a object"), ({"s": {1}}, r"it\['s'\] is a set")],
)
def test_what_has_no_form_is_named(value: Any, place: str) -> None:
    """Where it is, and of which type."""
    with pytest.raises(NotPlain, match=place):
        encode(value, {}, "it")


def test_files_are_private(tmp_path: Path) -> None:
    """Prompts and completions are in them."""
    write(tmp_path, state(buffered_inputs=encode([torch.ones(1)], tensors := {}, "it")), tensors)
    files = sorted((tmp_path / format.FOLDER).iterdir())
    assert [file.name for file in files] == ["rank0.json", "rank0.safetensors"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_second_save_of_a_step_leaves_no_old_tensors(tmp_path: Path) -> None:
    """They would be verified, and belong to nothing."""
    write(tmp_path, state(), {"t0": torch.ones(1)})
    write(tmp_path, state(), {})
    assert not format.json_path(tmp_path, 0).with_suffix(".safetensors").exists()
    assert read(tmp_path, 0) == (state(), {})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not JSON"),
        (b'{"schema_version": 1, "rank"', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "not a rank's state"),
        (b"{}", "not a rank's state: schema_version"),
        (b'{"schema_version": 1, "rank": "0", "world_size": 1, "step": 3}', "not a rank's state: rank"),
        (b'{"schema_version": 1, "rank": 0, "world_size": 0, "step": 3}', "not a rank's state: world_size"),
        (b'{"schema_version": 9, "rank": 0, "world_size": 1, "step": 3}', "schema 9, this release knows 1"),
        (b'{"schema_version": 1, "rank": 7, "world_size": 8, "step": 3}', "is the state of rank 7"),
        (
            b'{"schema_version": 1, "rank": 0, "world_size": 1, "step": 3, "has_tensors": true}',
            "cannot be read",
        ),
    ],
)
def test_a_strange_file_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    """With the file's name and what is wrong, never with an error of a library's."""
    path = format.json_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read(tmp_path, 0)
    assert "rank0." in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """Named."""
    with pytest.raises(CheckpointError, match=r"rank0\.json cannot be read: No such file"):
        read(tmp_path, 0)


@given(cut=st.floats(min_value=0, max_value=0.999))
def test_a_file_cut_short_is_refused(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Either of the two, at any place."""
    folder = tmp_path_factory.mktemp("cut")
    for suffix in (".json", ".safetensors"):
        write(folder, state(), {"t0": torch.ones(5)})
        path = format.json_path(folder, 0).with_suffix(suffix)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
        with pytest.raises(CheckpointError):
            read(folder, 0)


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
def test_a_strange_tag_is_refused(tagged: Any) -> None:
    """Nothing but the listed kinds is made, and nothing is run."""
    with pytest.raises(CheckpointError, match="the file does not hold what was written there"):
        decode([tagged], {}, CPU, "the file")
