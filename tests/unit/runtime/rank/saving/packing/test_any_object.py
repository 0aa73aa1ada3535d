"""What holds for any structure and any weights."""

from __future__ import annotations

import string
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builders.trainers.packed_files import DTYPES, filled, wide, written

from grpo_run.runtime.rank.saving.packing import pack_safetensors, pack_torch
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
from grpo_run.runtime.snapshots.index import SnapshotIndex


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """Nested containers of tensors, some of which share storages, like a training state."""
    pool = [
        filled((draw(st.integers(0, 40)),), draw(st.sampled_from(DTYPES)), seed=number)
        for number in range(draw(st.integers(1, 4)))
    ]

    @st.composite
    def tensor(draw: st.DrawFn) -> torch.Tensor:
        base = draw(st.sampled_from(pool))
        start = draw(st.integers(0, len(base)))
        return base[start : draw(st.integers(start, len(base)))]

    leaves = st.one_of(tensor(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.none())
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.dictionaries(st.text(string.printable, max_size=6), inner, max_size=4),
                st.tuples(inner, inner),
            ),
            max_leaves=12,
        )
    )


@given(obj=objects())
def test_any_structure_is_packed_as_torch_writes_it(
    tmp_path_factory: pytest.TempPathFactory, obj: Any
) -> None:
    """Property test over nested containers."""
    folder = tmp_path_factory.mktemp("structure")
    torch.save(obj, folder / "x.pt")
    with SnapshotBuffer(folder / "buffer", measure=wide) as buffer:
        file = pack_torch(buffer, "x.pt", obj, protocol=2, disable_byteorder_record=False)
        assert file is not None
        assert (
            written(SnapshotIndex(files=[file]), buffer, folder / "copy")["x.pt"]
            == (folder / "x.pt").read_bytes()
        )


@given(
    shapes=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=8,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=1),
)
def test_any_weights_are_packed_as_safetensors_writes_them(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, tuple[list[int], torch.dtype]],
    metadata: dict[str, str] | None,
) -> None:
    """Property test over names, types and shapes."""
    tensors = {name: filled(tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
    folder = tmp_path_factory.mktemp("weights")
    with SnapshotBuffer(folder / "buffer", measure=wide) as buffer:
        file = pack_safetensors(buffer, "x.safetensors", tensors, metadata)
        assert file is not None
        copy = written(SnapshotIndex(files=[file]), buffer, folder / "copy")["x.safetensors"]
    assert copy == safetensors.torch.save(tensors, metadata)
