"""An object is packed as torch writes it, or refused if torch must write it."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builders.trainers.packed_files import BASE, DTYPES, Made, filled, trained, written
from torch.utils.serialization import config

from grpo_run.runtime.rank.saving.packing import pack_torch
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
from grpo_run.runtime.snapshots.index import SnapshotIndex


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


def test_objects_without_tensors_are_pickled_as_by_torch(torch_copy: Made) -> None:
    """Custom pickling of such objects is used."""
    copy = torch_copy({"error": ValueError("kept"), "path": Path("a/b"), "number": 2**100})
    assert copy is not None
    assert pickle.dumps(Path("a/b"), protocol=2)[2:20] in copy
