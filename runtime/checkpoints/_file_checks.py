"""Check single files of a checkpoint: JSON, torch archives, safetensors, distributed checkpoints.

Called by `completeness.py`. Reads names, sizes and headers, and on request the checksums inside torch's
archives. The files of a distributed checkpoint are named in its `.metadata`, a pickle whose operations are
listed and not carried out, so no code in it runs. Never reads a tensor, and imports neither torch nor
safetensors. Safetensors files have no checksums, so only a manifest's digests
find a flipped bit in a tensor.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.compatibility import SavedTensor

MAX_HEADER_BYTES = 100_000_000
"""Limit of a header in the safetensors format."""
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
    _check_archive_end(path)  # zipfile would accept appended bytes as a comment
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


def _check_archive_end(path: Path) -> None:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _ARCHIVE_END_BYTES))
        if file.read(4) != _ARCHIVE_END:
            raise DamagedFileError("is truncated or changed (no zip end record)")


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
    tensors, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = SavedTensor(
                dtype=str(entry["dtype"]), shape=tuple(int(length) for length in entry["shape"])
            )
            end = max(end, int(entry["data_offsets"][1]))
        except (LookupError, TypeError, ValueError):
            raise DamagedFileError(f"has an invalid header entry for {name[:80]}") from None
    if 8 + length + end != size:
        raise DamagedFileError(f"has {size} bytes, its header says {8 + length + end}")
    return tensors


def check_distributed_folder(folder: Path) -> None:
    """Check a torch distributed checkpoint: `.metadata`, which is written last, and the ends of all files.

    Raises:
        DamagedFileError: the folder or one of its files is missing or truncated.
        OSError: a file cannot be read.
    """
    if not folder.is_dir():
        raise DamagedFileError("is missing")
    try:
        content = (folder / ".metadata").read_bytes()
        operations = list(pickletools.genops(content))
    except FileNotFoundError:
        raise DamagedFileError("has no .metadata, which is written last") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise DamagedFileError(f"has a truncated or changed .metadata ({error})") from None
    names = {text for _, text, _ in operations if isinstance(text, str) and text.endswith(".distcp")}
    if not names:
        raise DamagedFileError("has a .metadata that names no file")
    for name in sorted(names):
        if not (folder / name).is_file():
            raise DamagedFileError(f"lacks {name}")
        try:
            _check_archive_end(folder / name)  # the last of the archives in the file
        except DamagedFileError as error:
            raise DamagedFileError(f"holds {name}, which {error}") from None
