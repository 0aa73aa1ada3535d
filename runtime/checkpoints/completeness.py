"""Whether a checkpoint without a manifest has all its parts: what transformers needs to go on from it exactly.

Transformers itself goes on silently without an optimizer, a scheduler or random states, so they are asked for here.
Reads names, sizes, headers and (when asked) the checksums inside torch's zip files, never a tensor; the tensors of a
safetensors file carry no checksum, so a flipped bit in them is found by a manifest only. Called by the guard when it
resumes from a checkpoint it did not write, and by `grpo-run checkpoints`. Imports neither torch nor safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.dcp_metadata import Unreadable, file_sizes

STATE = "trainer_state.json"
MODEL = ("model", "adapter_model")
MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit of its header."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element, after safetensors' `Dtype`; an unknown type's sizes are taken as they are."""
_LEGACY_PICKLE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How torch's format before zip begins; it has no checksum."""
_ARCHIVE_END, _ARCHIVE_END_BYTES = b"PK\x05\x06", 22
"""The last record of a zip file without a comment, as torch writes it."""
_RANK_STATE = re.compile(r"rng_state_([0-9]+)\.pth")
_TAG = re.compile(r"global_step[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What a safetensors header says of one tensor. `dtype` in the format's words, as `BF16`."""

    dtype: str
    shape: tuple[int, ...]


class _Damaged(Exception):
    """A part is there and is not what it should be; its message says why, without the file's name."""


def missing(
    path: Path, world_size: int | None = None, layout: str | None = None, *, deep: bool = False
) -> list[str]:
    """What a checkpoint directory lacks, one phrase each; empty when its parts are complete.

    Args:
        path: a directory as transformers writes it.
        world_size: the ranks it should hold the state of; None to go by the files that are there. More or fewer
            ranks than that are complete too, as long as it is certain how many they were.
        layout: how the state is cut (`ddp`, `deepspeed-zero2`, `fsdp2`); None to go by the files.
        deep: read torch's files and compare their checksums.
    """
    lacks: list[str] = []

    def look(name: str, check: Any, *arguments: Any) -> None:
        try:
            check(path / name, *arguments)
        except _Damaged as error:
            lacks.append(f"{name} {error}")
        except OSError as error:
            lacks.append(f"{name} {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}")

    try:
        names = set(os.listdir(path))
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    kind = (layout or _layout(names)).partition("-")[0]
    look(STATE, _json_object)
    if "config.json" in names:
        look("config.json", _json_object)
    if kind == "deepspeed":
        lacks += _deepspeed(path, world_size, layout, look, deep)
        if _has_weights(names):  # not what DeepSpeed loads, but what a person may
            lacks += _weights(path, names, look, deep)
    elif kind.startswith("fsdp"):
        _fsdp(names, look, deep)
    else:
        lacks += _weights(path, names, look, deep)
        look("optimizer.pt", _torch_file, deep)
    if kind != "deepspeed" or "scheduler.pt" in names:
        look("scheduler.pt", _torch_file, deep)
    for name in ("scaler.pt", "training_args.bin"):
        if name in names:
            look(name, _torch_file, deep)
    for name in _random_states(names, world_size):
        look(name, _torch_file, deep)
    return lacks


def ranks(path: Path) -> int | None:
    """How many ranks wrote a checkpoint, by their random states; None when that cannot be told."""
    try:
        names = os.listdir(path)
    except OSError:
        return None
    numbers = [int(match[1]) for name in names if (match := _RANK_STATE.fullmatch(name))]
    if numbers:
        return max(numbers) + 1
    return 1 if "rng_state.pth" in names else None


def tensors(path: Path) -> dict[str, Tensor]:
    """Names, types and shapes of a checkpoint's weights, from safetensors headers; empty when it has none.

    Headers that cannot be read count as none: this explains a difference, it does not judge.
    """
    found: dict[str, Tensor] = {}
    for stem in MODEL:
        files = [path / f"{stem}.safetensors"]
        with contextlib.suppress(OSError, _Damaged):  # not cut into several
            files += [path / name for name in _shards(path / f"{stem}.safetensors.index.json")]
        for file in files:
            with contextlib.suppress(OSError, _Damaged):
                found |= _header(file)
    return found


def _layout(names: Iterable[str]) -> str:
    if any(_TAG.fullmatch(name) for name in names):
        return "deepspeed"
    if any(name.startswith("pytorch_model_fsdp") for name in names):
        return "fsdp"
    return "ddp"


def _random_states(names: Iterable[str], world_size: int | None) -> list[str]:
    """The files that should be there. `rng_state.pth` is one rank's; numbered ones are those of two or more."""
    numbers = [int(match[1]) for name in names if (match := _RANK_STATE.fullmatch(name))]
    if not numbers:
        alone = world_size in (None, 1) or "rng_state.pth" in names
        return ["rng_state.pth"] if alone else [f"rng_state_{rank}.pth" for rank in range(world_size or 0)]
    count = max(max(numbers) + 1, 2)
    if world_size is not None and count < world_size:
        count = world_size  # fewer ranks than now, or some that had not written yet: the safe reading
    return [f"rng_state_{rank}.pth" for rank in range(count)]


def _weights(path: Path, names: set[str], look: Any, deep: bool) -> list[str]:
    """Weights of one file, of shards, or of adapters, beside them or in folders of their own."""
    folders = [""] if _has_weights(names) else []
    for name in sorted(names):
        if (path / name).is_dir() and any(
            (path / name / f"adapter_model.{suffix}").exists() for suffix in ("safetensors", "bin")
        ):
            folders.append(f"{name}/")
    if not folders:
        return ["model.safetensors is missing"]
    for folder in folders:
        within = names if not folder else set(os.listdir(path / folder))
        for name in sorted(within):
            if name.endswith(".index.json") and name.startswith(("model.", "pytorch_model.")):
                look(folder + name, _shards)
                try:
                    shards = _shards(path / folder / name)
                except (OSError, _Damaged):
                    continue  # said of the index already
                for shard in shards:
                    look(folder + shard, *_check_of(shard, deep))
            elif name in _SINGLE:
                look(folder + name, *_check_of(name, deep))
    return []


_SINGLE = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def _has_weights(names: Iterable[str]) -> bool:
    return any(name in _SINGLE or name in _INDEX for name in names)


def _check_of(name: str, deep: bool) -> tuple[Any, ...]:
    return (_header,) if name.endswith(".safetensors") else (_torch_file, deep)


def _shards(index: Path) -> list[str]:
    names = _json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise _Damaged("has no weight map")
    return sorted(set(names.values()))


def _fsdp(names: set[str], look: Any, deep: bool) -> None:
    """Accelerate's two forms: one file, or a folder in torch's distributed format."""
    for stem, single in (("pytorch_model_fsdp", "pytorch_model_fsdp.bin"), ("optimizer", "optimizer.bin")):
        folders = [name for name in sorted(names) if re.fullmatch(rf"{stem}_[0-9]+", name)]
        for folder in folders:
            look(folder, _distributed)
        if not folders:
            look(single, _torch_file, deep)


def _distributed(folder: Path) -> None:
    """`.metadata` is written last, and says what every rank's file holds."""
    if not folder.is_dir():
        raise _Damaged("is missing")
    try:
        sizes = file_sizes((folder / ".metadata").read_bytes())
    except FileNotFoundError:
        raise _Damaged("has no .metadata, which is written last") from None
    except Unreadable as error:
        raise _Damaged(f"has a .metadata that is cut short or changed ({error})") from None
    for name, needed in sorted(sizes.items()):
        file = folder / name
        if not file.is_file():
            raise _Damaged(f"lacks {name}")
        if (size := file.stat().st_size) != needed:
            raise _Damaged(f"holds {name} with {size} bytes, its .metadata says {needed}")


def _deepspeed(path: Path, world_size: int | None, layout: str | None, look: Any, deep: bool) -> list[str]:
    """The folder that `latest` names, with the model and each rank's part of the optimizer."""
    try:
        tag = (path / "latest").read_text(errors="replace").strip()
    except OSError:
        return ["latest is missing"]
    try:
        names = set(os.listdir(path / tag)) if _TAG.fullmatch(tag) else set()
    except OSError:
        names = set()
    if not names:
        return [f"{tag[:40]}/, which latest names, is missing"]
    count = world_size or ranks(path) or 1
    if (written := ranks(path)) is not None and written > count:
        count = written
    if "mp_rank_00_model_states.pt" in names:
        look(f"{tag}/mp_rank_00_model_states.pt", _torch_file, deep)
    else:
        for rank in range(count):
            look(f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", _torch_file, deep)
    optimizers = [name for name in names if name.endswith("_optim_states.pt")]
    if optimizers or "zero" in (layout or ""):
        prefix = "bf16_" if any(name.startswith("bf16_") for name in optimizers) else ""
        for rank in range(count):
            look(f"{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", _torch_file, deep)
    return []


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _Damaged("is not JSON") from None
    if not isinstance(value, dict):
        raise _Damaged("is not a JSON object")
    return value


def _torch_file(path: Path, deep: bool) -> None:
    """A file of `torch.save`: a zip archive, whose directory is at its end."""
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY_PICKLE))
        if head == _LEGACY_PICKLE:
            return  # nothing in it to compare with
        if not head:
            raise _Damaged("is empty")
        file.seek(max(0, path.stat().st_size - _ARCHIVE_END_BYTES))
        if file.read(4) != _ARCHIVE_END:  # zipfile takes what follows it for a comment
            raise _Damaged("is cut short or changed (it does not end as an archive does)")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip() if deep else None
            if not archive.namelist():
                raise _Damaged("is an empty archive")
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise _Damaged(f"is cut short or changed ({str(error).rstrip('.')})") from None
    if bad is not None:
        raise _Damaged(f"does not match the checksum of {bad} in it")


def _header(path: Path) -> dict[str, Tensor]:
    """Read a safetensors header and compare what it says with the file's size."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise _Damaged(f"is cut short: {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise _Damaged("has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise _Damaged("has a header that is not a JSON object")
    found, spans = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor = Tensor(dtype=str(entry["dtype"]), shape=tuple(int(length) for length in entry["shape"]))
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (LookupError, TypeError, ValueError):
            raise _Damaged(f"has a header that says nothing of {name[:80]}") from None
        bits = _BITS.get(tensor.dtype)
        if bits is not None and (end - begin) * 8 != math.prod(tensor.shape) * bits:
            raise _Damaged(f"has a header whose sizes of {name[:80]} disagree")
        found[name] = tensor
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise _Damaged("has a header that leaves holes")
        at = end
    if 8 + length + at != size:
        raise _Damaged(f"has {size} bytes, its header says {8 + length + at}")
    return found
