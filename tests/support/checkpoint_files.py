"""Checkpoints with every file that transformers writes, a few bytes each; a trainer cannot load them."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path


class StorageInfo:
    """The fields of torch's `_StorageInfo` that are read."""

    relative_path: str
    offset: int
    length: int


class Metadata:
    """The fields of torch's `Metadata` that are read."""

    def __init__(self) -> None:
        self.storage_data: dict[int, StorageInfo] = {}


def safetensors(path: Path, tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    """Write a safetensors file of float32 zeros."""
    header, at = {}, 0
    for name, shape in (tensors or {"weight": (4, 2)}).items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


def torch_file(path: Path, content: bytes = b"numbers" * 100) -> Path:
    """Write an uncompressed zip archive with checksums, like `torch.save`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", content)
    return path


def random_states(path: Path, ranks: int) -> None:
    """Write one random state per rank, under the names that transformers uses."""
    for name in ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        torch_file(path / name)


def state(path: Path, step: int) -> None:
    """Write `trainer_state.json` and `config.json`."""
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": None}))
    (path / "config.json").write_text(json.dumps({"model_type": "tiny"}))


def plain(folder: Path, step: int, *, ranks: int = 2) -> Path:
    """Write `folder/checkpoint-<step>` of a replicated model, without a manifest."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    state(path, step)
    safetensors(path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        torch_file(path / name)
    random_states(path, ranks)
    return path


def deepspeed(folder: Path, step: int, *, ranks: int = 2, stage: int = 2) -> Path:
    """Write a checkpoint like transformers with DeepSpeed: the folder in `latest`, and other files."""
    path = plain(folder, step, ranks=ranks)
    (path / "optimizer.pt").unlink()
    tag = path / f"global_step{step}"
    tag.mkdir()
    (path / "latest").write_text(tag.name)
    if stage == 3:
        for rank in range(ranks):
            torch_file(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    else:
        torch_file(tag / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        torch_file(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def fsdp(folder: Path, step: int, *, ranks: int = 2) -> Path:
    """Write a checkpoint like accelerate with FSDP: two folders in torch's distributed format."""
    path = plain(folder, step, ranks=ranks)
    for name in ("optimizer.pt", "model.safetensors"):
        (path / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (path / name).mkdir()
        metadata = Metadata()
        for rank in range(ranks):
            file = torch_file(path / name / f"__{rank}_0.distcp")
            info = StorageInfo()
            info.relative_path, info.offset, info.length = file.name, 0, file.stat().st_size
            metadata.storage_data[rank] = info
        (path / name / ".metadata").write_bytes(pickle.dumps(metadata))
    return path
