"""Puts what a library is about to save into an arena: tensors' bytes at the speed of memory, the rest as it is.

Called by `interception.py`; the copies are `copying.py`'s. What cannot be put down exactly as the library would write
it is refused (None), before anything is copied, and left to the library. Does not replace any function, nor write files.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from grpo_run.runtime.staging.buffer import SnapshotBuffer, aligned
from grpo_run.runtime.staging.index import Record, SafetensorsFile, TorchFile
from grpo_run.trainers import upstream
from grpo_run.trainers.capture.copying import Copy, copy_all

DEVICES = frozenset({"cpu", "cuda"})
"""Where a storage's bytes can be copied from as they are; anything else the library moves itself."""
HEADER_ALIGNMENT_BYTES = 8
"""Safetensors pads its header with spaces to a multiple of it."""


def pack_torch(
    arena: SnapshotBuffer,
    path: str,
    obj: Any,
    *,
    protocol: int,
    disable_byteorder_record: bool,
    threads: int = 1,
) -> TorchFile | None:
    """The archive that `torch.save` would write of `obj`, its bytes in `arena`; None when torch had better write it.

    Args:
        path: relative to the checkpoint.
        threads: to copy with.

    Raises:
        NoRoomError: nothing was appended.
    """
    if upstream.skips_data():
        return None
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        records = upstream.archive_records(
            obj, _recording_pickle(storages), protocol, disable_byteorder_record
        )
    except Exception:  # noqa: BLE001 - of any kind: the objects pickle themselves
        return None  # torch itself is asked next, and raises what there is to raise
    sources = [
        storages.get(name.removeprefix("data/")) for name, content in records if isinstance(content, int)
    ]
    if any(source is None or source.device.type not in DEVICES for source in sources):
        return None
    sizes = [content if isinstance(content, int) else len(content) for _, content in records]
    arena.reserve(sum(aligned(size) for size in sizes))
    placed, copies = [], []
    for (name, content), size in zip(records, sizes, strict=True):
        if isinstance(content, bytes):
            offset = arena.append(content)
        else:
            offset = arena.allocate(size)
            copies.append(Copy(storages[name.removeprefix("data/")], 0, offset, size))
        placed.append(Record(name=name, offset=offset, size=size))
    copy_all(arena, copies, threads=threads)
    compute_crc32, storage_alignment = upstream.archive_settings()
    return TorchFile(
        path=path, records=tuple(placed), compute_crc32=compute_crc32, storage_alignment=storage_alignment
    )


def pack_safetensors(
    arena: SnapshotBuffer, path: str, tensors: Any, metadata: Mapping[str, str] | None, *, threads: int = 1
) -> SafetensorsFile | None:
    """The file that `save_file` would write, its bytes in `arena`; None when safetensors had better write it.

    Safetensors shuffles a metadata of several entries; here it keeps its order, which is one of theirs.

    Args:
        path: relative to the checkpoint.
        threads: to copy with.

    Raises:
        NoRoomError: nothing was appended.
    """
    try:
        upstream.check_safetensors(tensors)
        header = safetensors_header(tensors, metadata)
    except Exception:  # noqa: BLE001 - of any kind: the caller's arguments are checked nowhere else
        return None  # safetensors itself is asked next, and raises what there is to raise
    if header is None:
        return None
    lead = struct.pack("<Q", len(header)) + header
    ordered = sorted(tensors.items(), key=_place)
    size = len(lead) + sum(_size(tensor) for _, tensor in ordered)
    offset = arena.allocate(size)
    with arena.view(offset, len(lead)) as view:
        view[:] = lead
    position, copies = offset + len(lead), []
    for _, tensor in ordered:
        copies.append(Copy(tensor.untyped_storage(), _start(tensor), position, _size(tensor)))
        position += _size(tensor)
    copy_all(arena, copies, threads=threads)
    return SafetensorsFile(path=path, records=(Record(name="file", offset=offset, size=size),))


def safetensors_header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes | None:
    """The JSON before the tensors, with its padding, as safetensors writes it; None for what it says in other words.

    The format: the README of huggingface/safetensors. The order (type, then name) and the padding: its
    `safetensors/src/tensor.rs`, function `prepare`.
    """
    if not tensors:
        return None  # safetensors 0.8 writes a brace too many
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
    for name, tensor in sorted(tensors.items(), key=_place):
        end = position + _size(tensor)
        content[name] = {
            "dtype": upstream.SAFETENSORS_TYPES[_type_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is, as it lies, what safetensors would write."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type in DEVICES
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _type_name(tensor) in upstream.SAFETENSORS_TYPES
        # sharding code frees a parameter's storage and keeps its shape
        and _start(tensor) + _size(tensor) <= tensor.untyped_storage().nbytes()
    )


def _type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_ORDER = {name: place for place, name in enumerate(upstream.SAFETENSORS_TYPES)}


def _place(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Where a tensor comes in the file. Rust compares strings by their UTF-8 bytes, which is by code points."""
    name, tensor = item
    return _ORDER[_type_name(tensor)], name


def _recording_pickle(storages: dict[str, torch.UntypedStorage]) -> Any:
    """A stand-in for the module `pickle` that notes each storage under the key that torch gives it.

    Torch makes a subclass of its module's Pickler for each save and answers there for storages.
    """

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            answer = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                found = answer(self, obj)
                if found is not None:
                    if getattr(obj, "_fake_device", None) is not None:
                        raise NotImplementedError("a storage without bytes")
                    storages[found[2]] = getattr(obj, "_untyped_storage", obj)
                return found

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(Pickler=Pickler, __name__=pickle.__name__)
