"""Check single files of a checkpoint: JSON, torch archives, safetensors, distributed checkpoints.

Called by `completeness.py`. Reads names, sizes and headers, and on request the checksums inside torch's
archives. The expected sizes of a distributed checkpoint come from its `.metadata`, a pickle that is read
with every class and function replaced by an inert object, so no code in it runs. Never reads a tensor, and
imports neither torch nor safetensors. Safetensors files have no checksums, so only a manifest's digests
find a flipped bit in a tensor.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.compatibility import SavedTensor


class UnreadableMetadataError(Exception):
    """The metadata is not a complete pickle, or does not name any files."""


class _Inert(dict[Any, Any]):
    """Replacement for every object in the pickle: accepts all arguments and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, _: Any) -> None:
        """Ignore the items of a list."""

    def add(self, _: Any) -> None:
        """Ignore an item of a set."""

    __hash__ = object.__hash__  # type: ignore[assignment] # the format uses it as a dictionary key
    __eq__ = object.__eq__


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_file_sizes(metadata: bytes) -> dict[str, int]:
    """Return the size in bytes of every data file, by name.

    Args:
        metadata: the contents of `.metadata`.

    Raises:
        UnreadableMetadataError: the sizes cannot be determined.
    """
    try:
        content = _InertUnpickler(io.BytesIO(metadata)).load()
        sizes: dict[str, int] = {}
        for info in content.storage_data.values():
            name, end = str(info.relative_path), int(info.offset) + int(info.length)
            sizes[name] = max(sizes.get(name, 0), end)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise UnreadableMetadataError(f"{type(error).__name__}: {error}") from None
    if not sizes:
        raise UnreadableMetadataError("it names no file")
    return sizes


MAX_HEADER_BYTES = 100_000_000
"""Limit of a header in the safetensors format."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element, from safetensors' `Dtype`. Sizes of unknown types are not checked."""
_LEGACY_PICKLE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch's format before zip archives, which has no checksums."""
_ARCHIVE_END, _ARCHIVE_END_BYTES = b"PK\x05\x06", 22
"""The last record of a zip archive without a comment, as torch writes it."""


class DamagedFileError(Exception):
    """A file exists but is not valid. The message says why, without the file name."""


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Read a file that contains one JSON object.

    Raises:
        DamagedFileError: the content is something else.
        OSError: the file cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise DamagedFileError("is not JSON") from None
    if not isinstance(value, dict):
        raise DamagedFileError("is not a JSON object")
    return value


def read_shard_names(index: Path) -> list[str]:
    """Return the file names in the weight map of a sharded model's index. Raises as `read_json_object`."""
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DamagedFileError("has no weight map")
    return sorted(set(names.values()))


def check_torch_file(path: Path, verify_checksums: bool) -> None:
    """Check that a file of `torch.save` is a complete zip archive.

    Args:
        verify_checksums: read the whole file and compare the CRC-32 of every record, if it has them.

    Raises:
        DamagedFileError: the archive is truncated or changed.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY_PICKLE))
        if head == _LEGACY_PICKLE:
            return  # this format has nothing to compare with
        if not head:
            raise DamagedFileError("is empty")
        file.seek(max(0, path.stat().st_size - _ARCHIVE_END_BYTES))
        if file.read(4) != _ARCHIVE_END:  # zipfile would accept appended bytes as a comment
            raise DamagedFileError("is truncated or changed (no zip end record)")
    try:
        with zipfile.ZipFile(path) as archive:
            # torch writes zeros where it computes no checksums, as for checkpoints that were in memory
            has_checksums = any(record.CRC for record in archive.infolist())
            bad_record = archive.testzip() if verify_checksums and has_checksums else None
            if not archive.namelist():
                raise DamagedFileError("is an empty archive")
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise DamagedFileError(f"is truncated or changed ({str(error).rstrip('.')})") from None
    if bad_record is not None:
        raise DamagedFileError(f"does not match the checksum of its record {bad_record}")


def read_safetensors_header(path: Path) -> dict[str, SavedTensor]:
    """Read the header of a safetensors file and check it against the file size.

    Returns:
        The tensors by name.

    Raises:
        DamagedFileError: the header is invalid, or the file is longer or shorter than the header says.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise DamagedFileError(f"is truncated: {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise DamagedFileError("has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise DamagedFileError("has a header that is not a JSON object")
    tensors, spans = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor = SavedTensor(
                dtype=str(entry["dtype"]), shape=tuple(int(length) for length in entry["shape"])
            )
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (LookupError, TypeError, ValueError):
            raise DamagedFileError(f"has an invalid header entry for {name[:80]}") from None
        bits = _BITS.get(tensor.dtype)
        if bits is not None and (end - begin) * 8 != math.prod(tensor.shape) * bits:
            raise DamagedFileError(f"has a header entry for {name[:80]} whose shape and size disagree")
        tensors[name] = tensor
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise DamagedFileError("has a header whose offsets leave gaps")
        position = end
    if 8 + length + position != size:
        raise DamagedFileError(f"has {size} bytes, its header says {8 + length + position}")
    return tensors


def check_distributed_folder(folder: Path) -> None:
    """Check a torch distributed checkpoint: `.metadata`, which is written last, and all file sizes.

    Raises:
        DamagedFileError: the folder or one of its files is missing, truncated or changed.
        OSError: a file cannot be read.
    """
    if not folder.is_dir():
        raise DamagedFileError("is missing")
    try:
        sizes = read_file_sizes((folder / ".metadata").read_bytes())
    except FileNotFoundError:
        raise DamagedFileError("has no .metadata, which is written last") from None
    except UnreadableMetadataError as error:
        raise DamagedFileError(f"has a truncated or changed .metadata ({error})") from None
    for name, expected in sorted(sizes.items()):
        file = folder / name
        if not file.is_file():
            raise DamagedFileError(f"lacks {name}")
        if (size := file.stat().st_size) != expected:
            raise DamagedFileError(f"holds {name} with {size} bytes, its .metadata says {expected}")
