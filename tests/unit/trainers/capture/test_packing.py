"""Packed files have the bytes that torch and safetensors write."""

from __future__ import annotations

import pickle
import random
import string
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.staging.buffer import GROWTH_BYTES, SnapshotBuffer
from grpo_run.runtime.staging.buffer_reader import SnapshotBufferReader
from grpo_run.runtime.staging.headroom import Headroom
from grpo_run.runtime.staging.index import SnapshotIndex, parse_index
from grpo_run.runtime.staging.writer import write_files
from grpo_run.trainers.capture import copying
from grpo_run.trainers.capture.packing import pack_safetensors, pack_torch

Made = Callable[..., bytes | None]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def wide(folder: Path) -> Headroom:
    """Return a limit that is never reached."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any type with random bytes."""
    size = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(content.untyped_storage(), 0, shape)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[SnapshotBuffer]:
    """An empty buffer."""
    with SnapshotBuffer(tmp_path / "buffer", measure=wide) as made:
        yield made


def written(index: SnapshotIndex, buffer: SnapshotBuffer, folder: Path) -> dict[str, bytes]:
    """Write the files of an index to disk, via its JSON form, and return their contents."""
    with SnapshotBufferReader(buffer.path) as reader:
        paths = write_files(parse_index(index.to_json()), reader, folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def torch_copy(buffer: SnapshotBuffer, tmp_path: Path) -> Made:
    """Pack an object and return the bytes of the archive, or None if it is refused."""

    def make(obj: Any, name: str = "optimizer.pt", protocol: int = 2) -> bytes | None:
        file = pack_torch(buffer, name, obj, protocol=protocol, disable_byteorder_record=False)
        return None if file is None else written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")[name]

    return make


@pytest.fixture
def torch_direct(tmp_path: Path) -> Made:
    """Save an object with torch and return the bytes of the archive."""

    def make(obj: Any, name: str = "optimizer.pt", protocol: int = 2) -> bytes:
        path = tmp_path / "direct" / name
        path.parent.mkdir(exist_ok=True)
        torch.save(obj, path, pickle_protocol=protocol)
        return path.read_bytes()

    return make


@pytest.fixture
def safe_copy(buffer: SnapshotBuffer, tmp_path: Path) -> Made:
    """Pack tensors and return the bytes of the file, or None if they are refused."""

    def make(tensors: Any, metadata: Any = None) -> bytes | None:
        file = pack_safetensors(buffer, "model.safetensors", tensors, metadata)
        if file is None:
            return None
        return written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")["model.safetensors"]

    return make


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with tied weights and its AdamW optimizer after two steps."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.arange(50)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizer_is_packed_as_torch_writes_it(
    torch_copy: Made, torch_direct: Made, tmp_path: Path
) -> None:
    """torch can load it with `weights_only`."""
    _, optimizer = trained()
    assert torch_copy(optimizer.state_dict()) == torch_direct(optimizer.state_dict())
    loaded = torch.load(tmp_path / "copy/optimizer.pt", weights_only=True)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(loaded["state"][key][name], value) for name, value in state.items())


def test_a_model_with_tied_weights_is_packed_as_torch_writes_it(
    torch_copy: Made, torch_direct: Made, tmp_path: Path
) -> None:
    """The shared storage is saved once and is shared again after loading."""
    model, _ = trained()
    assert torch_copy(model.state_dict()) == torch_direct(model.state_dict())
    loaded = torch.load(tmp_path / "copy/optimizer.pt", weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["3.weight"].data_ptr()


BASE = torch.arange(60.0)


@pytest.mark.parametrize(
    "obj",
    [
        {},
        None,
        "text only",
        [1, (2.5, {"three": {4, 5}}), OrderedDict(six=b"seven"), random.Random(0).getstate()],
        {"rng": torch.get_rng_state()},
        [BASE[10:20], BASE[::2], BASE.view(6, 10).t(), BASE],
        torch.empty(0),
        [torch.empty(0, 3), torch.empty(3, 0), torch.tensor(1.5)],
        torch.nn.Parameter(torch.ones(3), requires_grad=True),
        [torch.ones(3).untyped_storage(), torch.ones(2, dtype=torch.int8)],
        torch.eye(5).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.optim.lr_scheduler.LambdaLR(trained()[1], [lambda step: 1.0]).state_dict(),
        [filled((3, 5), dtype) for dtype in DTYPES],
        torch.arange(3_000_000),
        torch.nn.Linear(3, 3),
    ],
    ids=lambda value: None,
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_is_packed_as_torch_writes_it(
    torch_copy: Made, torch_direct: Made, obj: Any, protocol: int
) -> None:
    """Holds for nested, viewed, empty, sparse and large tensors of every type, and for modules."""
    copy = torch_copy(obj, protocol=protocol)
    assert copy is not None
    assert copy == torch_direct(obj, protocol=protocol)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "no_suffix", "two.dots.pt", "höher.pt", "sub/rng_state_0.pth"]
)
def test_the_archive_is_named_after_its_file(buffer: SnapshotBuffer, tmp_path: Path, name: str) -> None:
    """torch derives the name of the archive from the file name, differently for non-ASCII names."""
    file = pack_torch(buffer, name, [torch.ones(3)], protocol=2, disable_byteorder_record=False)
    assert file is not None
    direct = tmp_path / "direct" / name
    direct.parent.mkdir(parents=True)
    torch.save([torch.ones(3)], direct)
    assert written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")[name] == direct.read_bytes()


def test_the_settings_of_the_save_are_used(torch_copy: Made, torch_direct: Made) -> None:
    """torch's settings at the time of the save apply when the file is written later."""
    with config.patch({"save.compute_crc32": False, "save.storage_alignment": 4096}):
        direct = torch_direct(torch.arange(100))
        copy = torch_copy(torch.arange(100))
    assert copy == direct != torch_direct(torch.arange(100))


class Unpicklable:
    """An object that cannot be pickled, like a lock or a socket."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class SavesItself:
    """An object whose pickling creates a tensor."""

    def __init__(self) -> None:
        self.made = torch.arange(5)

    def __getstate__(self) -> dict[str, Any]:
        return {"made": self.made * 2}


def test_a_tensor_created_during_pickling_is_packed(torch_copy: Made, torch_direct: Made) -> None:
    """Packing keeps a reference to the tensor until it is copied."""
    assert torch_copy([SavesItself() for _ in range(50)]) == torch_direct([SavesItself() for _ in range(50)])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        Unpicklable,
        lambda: lambda: None,
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: [torch.zeros(4).view(torch.int32), (base := torch.zeros(4)), base.view(torch.int32)],
    ],
    ids=["unpicklable", "lambda", "quantized", "nested", "two types of one storage"],
)
def test_objects_that_torch_must_write_are_refused(buffer: SnapshotBuffer, make: Callable[[], Any]) -> None:
    """Nothing is appended to the buffer."""
    assert pack_torch(buffer, "x.pt", make(), protocol=2, disable_byteorder_record=False) is None
    assert buffer.held_bytes == 0


def test_a_save_without_data_is_refused(buffer: SnapshotBuffer) -> None:
    """Under `skip_data`, torch writes files with holes."""
    with torch.serialization.skip_data():
        assert pack_torch(buffer, "x.pt", [torch.ones(3)], protocol=2, disable_byteorder_record=False) is None


def test_packing_restores_skip_data(torch_copy: Made, torch_direct: Made) -> None:
    """Holds after a success and after a failure."""
    assert torch_copy(Unpicklable()) is None
    direct = torch_direct(torch.ones(1000))
    assert torch_copy(torch.ones(1000)) == direct == torch_direct(torch.ones(1000))


def test_later_changes_of_a_tensor_do_not_change_the_buffer(buffer: SnapshotBuffer, tmp_path: Path) -> None:
    """Training continues before the file is written."""
    weight = torch.zeros(1000)
    archive = pack_torch(buffer, "x.pt", weight, protocol=2, disable_byteorder_record=False)
    weights = pack_safetensors(buffer, "x.safetensors", {"weight": weight}, None)
    assert archive is not None
    assert weights is not None
    weight.fill_(1)
    written(SnapshotIndex(files=[archive, weights]), buffer, tmp_path / "copy")
    assert not torch.load(tmp_path / "copy/x.pt", weights_only=True).any()
    assert not safetensors.torch.load_file(tmp_path / "copy/x.safetensors")["weight"].any()


@pytest.mark.parametrize(
    "tensors",
    [
        {"one": torch.tensor(1.5)},
        {
            'é"\\\n\x01\x7f\u2028😀/': torch.ones(2),
            "z": torch.empty(0),
            "Z": torch.empty(0, 3),
            "": torch.ones(1),
        },
        {
            f"{dtype}.{name}": filled((3, size), dtype)
            for dtype in DTYPES
            for name, size in (("b", 1), ("a", 7))
        },
        {"view": BASE[10:20], "parameter": torch.nn.Parameter(torch.ones(3))},
        {"large": torch.arange(3_000_000), "small": torch.ones(1)},
    ],
    ids=["scalar", "names", "types", "views", "large"],
)
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'né"': "\n"}])
def test_weights_are_packed_as_safetensors_writes_them(
    safe_copy: Made, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    """Order, padding and escapes are equal."""
    copy = safe_copy(tensors, metadata)
    assert copy is not None
    assert copy == safetensors.torch.save(tensors, metadata)
    with safetensors.safe_open(str(tmp_path / "copy/model.safetensors"), "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == metadata


def test_the_weights_of_a_real_model_are_packed_as_safetensors_writes_them(safe_copy: Made) -> None:
    """Tied weights are refused, as safetensors rejects them."""
    state = trained()[0].state_dict()
    assert safe_copy(state) is None
    del state["3.weight"]
    assert safe_copy(state, {"format": "pt"}) == safetensors.torch.save(state, {"format": "pt"})


def test_a_tensor_with_a_freed_storage_is_refused(safe_copy: Made) -> None:
    """Sharding frees storages of parameters; no memory beyond the storage is read."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    assert safe_copy({"weight": tensor}) is None


def test_several_threads_pack_the_same_bytes(
    buffer: SnapshotBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for both formats, with chunks that divide no tensor evenly."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 1000)
    state = {f"layer-{number}": filled((37, number + 11), torch.float32, number) for number in range(20)}
    one = pack_torch(buffer, "a.pt", state, protocol=2, disable_byteorder_record=False)
    other = pack_torch(buffer, "b.pt", state, protocol=2, disable_byteorder_record=False, threads=4)
    safe = [
        pack_safetensors(buffer, f"{threads}.safetensors", state, None, threads=threads) for threads in (1, 4)
    ]
    assert one is not None
    assert other is not None
    assert None not in safe
    made = written(SnapshotIndex(files=[one, other, *safe]), buffer, tmp_path / "copy")  # type: ignore[list-item]
    assert made["1.safetensors"] == made["4.safetensors"] == safetensors.torch.save(state)
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt")
    assert made["a.pt"] == (tmp_path / "a.pt").read_bytes()
    assert made["b.pt"] == (tmp_path / "b.pt").read_bytes()


def test_several_metadata_entries_are_packed(safe_copy: Made, tmp_path: Path) -> None:
    """safetensors writes them in random order, so the bytes of the header cannot be compared."""
    metadata = {name: name.upper() for name in "hello world"}
    copy = safe_copy({"weight": torch.ones(2)}, metadata)
    direct = safetensors.torch.save({"weight": torch.ones(2)}, metadata)
    assert copy is not None
    assert len(copy) == len(direct)
    (tmp_path / "direct.safetensors").write_bytes(direct)
    opened = [
        safetensors.safe_open(str(path), "pt")
        for path in (tmp_path / "copy/model.safetensors", tmp_path / "direct.safetensors")
    ]
    assert opened[0].metadata() == opened[1].metadata() == metadata
    assert opened[0].keys() == opened[1].keys()
    assert torch.equal(opened[0].get_tensor("weight"), opened[1].get_tensor("weight"))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, None),
        ({}, {"format": "pt"}),
        ({"turned": torch.ones(2, 3).t()}, None),
        ({"one": BASE, "other": BASE}, None),
        ({"sparse": torch.eye(3).to_sparse()}, None),
        ({"meta": torch.empty(3, device="meta")}, None),
        ({"conjugate": torch.ones(2, dtype=torch.complex64).conj()}, None),
        ({"wide": torch.ones(2, dtype=torch.complex128)}, None),
        ({"packed": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, None),
        ({"text": "no tensor"}, None),
        ({1: torch.ones(1)}, None),
        ({"\ud800": torch.ones(1)}, None),
        ({"__metadata__": torch.ones(1)}, None),
        ({"weight": torch.ones(1)}, {"number": 1}),
        ({"weight": torch.ones(1)}, "text"),
        ([torch.ones(1)], None),
        (None, None),
    ],
    ids=lambda value: None,
)
def test_tensors_that_safetensors_must_write_are_refused(
    buffer: SnapshotBuffer, tensors: Any, metadata: Any
) -> None:
    """safetensors raises its own error or writes another format; nothing is appended."""
    assert pack_safetensors(buffer, "x.safetensors", tensors, metadata) is None
    assert buffer.held_bytes == 0


def test_lack_of_memory_is_raised_and_nothing_is_appended(tmp_path: Path) -> None:
    """The error is raised before anything is copied."""
    small = Headroom(name="a small limit", free_bytes=(64 << 20) + GROWTH_BYTES, total_bytes=100 << 20)
    with SnapshotBuffer(tmp_path / "small", measure=lambda folder: small) as buffer:
        state = {"fits": torch.ones(1000), "does not": torch.ones(GROWTH_BYTES)}
        with pytest.raises(NoHeadroomError, match="a small limit"):
            pack_torch(buffer, "x.pt", state, protocol=2, disable_byteorder_record=False)
        with pytest.raises(NoHeadroomError, match="a small limit"):
            pack_safetensors(buffer, "x.safetensors", state, None)
        assert buffer.allocate(0) == 0
        assert pack_torch(
            buffer, "x.pt", {"fits": torch.ones(1000)}, protocol=2, disable_byteorder_record=False
        )


@pytest.mark.parametrize("sizes", [(10, 3_000_000, 10), (3_000_000, 100, 2_000_000)])
def test_a_reused_buffer_contains_the_last_snapshot(
    buffer: SnapshotBuffer, torch_direct: Made, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Holds if the previous snapshot was larger or smaller."""
    for size in sizes:
        buffer.begin()
        obj = {"step": size, "weight": torch.arange(size)}
        file = pack_torch(buffer, "x.pt", obj, protocol=2, disable_byteorder_record=False)
        assert file is not None
        copy = written(SnapshotIndex(files=[file]), buffer, tmp_path / "copy")["x.pt"]
        assert copy == torch_direct(obj, name="x.pt")


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


def test_objects_without_tensors_are_pickled_as_by_torch(torch_copy: Made) -> None:
    """Custom pickling of such objects is used."""
    copy = torch_copy({"error": ValueError("kept"), "path": Path("a/b"), "number": 2**100})
    assert copy is not None
    assert pickle.dumps(Path("a/b"), protocol=2)[2:20] in copy
