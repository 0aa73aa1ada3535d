"""A buffer has the bytes of the moment of the save, by any number of threads, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from support.builders.trainers.packed_files import Made, filled, written

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving import copying
from grpo_run.runtime.rank.saving.packing import pack_safetensors, pack_torch
from grpo_run.runtime.snapshots.buffer import GROWTH_BYTES, SnapshotBuffer
from grpo_run.runtime.snapshots.headroom import Headroom
from grpo_run.runtime.snapshots.index import SnapshotIndex


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
