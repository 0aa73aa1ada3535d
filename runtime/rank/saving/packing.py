"""Lay out an object in a snapshot buffer, with the bytes that torch or safetensors would write.

Called by `interception.py`; `copying.py` copies the tensors. What cannot be laid out exactly is refused
(None) before anything is copied, and the library writes it. Does not replace functions or write files.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from grpo_run.runtime.rank.saving.copying import Copy, copy_all
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer, aligned
from grpo_run.runtime.snapshots.index import BufferRecord, SafetensorsFile, TorchFile
from grpo_run.runtime.upstream import tensor_files

DEVICES = frozenset({"cpu", "cuda"})
"""Device types whose storages can be copied byte for byte; the library saves all others."""
HEADER_ALIGNMENT_BYTES = 8
"""safetensors pads its header with spaces to a multiple of this."""


def pack_torch(
    buffer: SnapshotBuffer,
    path: str,
    obj: Any,
    *,
    protocol: int,
    disable_byteorder_record: bool,
    threads: int = 1,
) -> TorchFile | None:
    """Lay out the archive that `torch.save` would write for `obj`, or return None if torch must write it.

    Args:
        path: relative to the checkpoint directory.
        protocol: the pickle protocol.
        disable_byteorder_record: torch's argument of this name.
        threads: maximum number of copying threads.

    Raises:
        NoHeadroomError: the buffer could not grow; nothing was appended.
    """
    if tensor_files.skips_data():
        return None
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        records = tensor_files.archive_records(
            obj, _recording_pickle(storages), protocol, disable_byteorder_record
        )
    except Exception:  # noqa: BLE001 - the objects' own pickling code may raise anything
        return None  # torch.save is called next and raises its own error
    sources = [
        storages.get(name.removeprefix("data/")) for name, content in records if isinstance(content, int)
    ]
    if any(source is None or source.device.type not in DEVICES for source in sources):
        return None
    sizes = [content if isinstance(content, int) else len(content) for _, content in records]
    buffer.reserve(sum(aligned(size) for size in sizes))
    placed, copies = [], []
    for (name, content), size in zip(records, sizes, strict=True):
        if isinstance(content, bytes):
            offset = buffer.append(content)
        else:
            offset = buffer.allocate(size)
            copies.append(Copy(storages[name.removeprefix("data/")], 0, offset, size))
        placed.append(BufferRecord(name=name, offset=offset, size=size))
    copy_all(buffer, copies, threads=threads)
    compute_crc32, storage_alignment = tensor_files.archive_settings()
    return TorchFile(
        path=path, records=tuple(placed), compute_crc32=compute_crc32, storage_alignment=storage_alignment
    )


def pack_safetensors(
    buffer: SnapshotBuffer, path: str, tensors: Any, metadata: Mapping[str, str] | None, *, threads: int = 1
) -> SafetensorsFile | None:
    """Lay out the file that `save_file` would write, or return None if safetensors must write it.

    safetensors writes several metadata entries in random order; here they keep their order, which is one of
    those.

    Args:
        path: relative to the checkpoint directory.
        threads: maximum number of copying threads.

    Raises:
        NoHeadroomError: the buffer could not grow; nothing was appended.
    """
    try:
        tensor_files.check_safetensors(tensors)
        header = safetensors_header(tensors, metadata)
    except Exception:  # noqa: BLE001 - the arguments are not checked before
        return None  # save_file is called next and raises its own error
    if header is None:
        return None
    prefix = struct.pack("<Q", len(header)) + header
    ordered = sorted(tensors.items(), key=_sort_key)
    size = len(prefix) + sum(_size_bytes(tensor) for _, tensor in ordered)
    offset = buffer.allocate(size)
    with buffer.view(offset, len(prefix)) as view:
        view[:] = prefix
    position, copies = offset + len(prefix), []
    for _, tensor in ordered:
        copies.append(Copy(tensor.untyped_storage(), _start_bytes(tensor), position, _size_bytes(tensor)))
        position += _size_bytes(tensor)
    copy_all(buffer, copies, threads=threads)
    return SafetensorsFile(path=path, records=(BufferRecord(name="file", offset=offset, size=size),))


def safetensors_header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes | None:
    """Return the JSON header with its padding as safetensors writes it, or None if it would write another.

    Sources: the README of huggingface/safetensors for the format; the function `prepare` in its
    `safetensors/src/tensor.rs` for the order (type, then name) and the padding.
    """
    if not tensors:
        return None  # safetensors 0.8 writes one brace too many
    if not all(isinstance(name, str) and name != "__metadata__" for name in tensors):
        return None
    if not all(_is_plain(tensor) for tensor in tensors.values()):
        return None
    content: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for item in metadata.items() for text in item):
            return None
        content["__metadata__"] = dict(metadata)
    position = 0
    for name, tensor in sorted(tensors.items(), key=_sort_key):
        end = position + _size_bytes(tensor)
        content[name] = {
            "dtype": tensor_files.SAFETENSORS_TYPES[_type_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether safetensors would write the tensor's memory as it is."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type in DEVICES
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _type_name(tensor) in tensor_files.SAFETENSORS_TYPES
        # sharding frees the storage of a parameter and keeps its shape
        and _start_bytes(tensor) + _size_bytes(tensor) <= tensor.untyped_storage().nbytes()
    )


def _type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _start_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_TYPE_ORDER = {name: position for position, name in enumerate(tensor_files.SAFETENSORS_TYPES)}


def _sort_key(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Return the sort key of a tensor in the file; Rust sorts names by UTF-8 bytes, like code points."""
    name, tensor = item
    return _TYPE_ORDER[_type_name(tensor)], name


def _recording_pickle(storages: dict[str, torch.UntypedStorage]) -> Any:
    """Return a replacement for the module `pickle` that records storages in `storages`.

    The keys are those that torch gives them. For each save, torch subclasses the module's Pickler and
    overrides `persistent_id` for storages.
    """

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            original = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                identifier = original(self, obj)
                if identifier is not None:
                    if getattr(obj, "_fake_device", None) is not None:
                        raise NotImplementedError("a fake storage has no bytes")
                    storages[identifier[2]] = getattr(obj, "_untyped_storage", obj)
                return identifier

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(Pickler=Pickler, __name__=pickle.__name__)
