"""Write the files of a snapshot over spare files of an earlier one, whose memory is allocated already.

Most of the time of a save into memory is the kernel's for pages that are used for the first time: a
gigabyte takes about a second. `torch.save` and `safetensors.torch.save_file` truncate a file and so give
its pages back. `reuse_files` replaces both for one thread, below one directory: `torch.save` itself writes
into an open file, and safetensors' simple format is written here. What cannot be written so, the library
writes as usual.

Called by `snapshots.py` around the trainer's own checkpoint method. Does not decide where a checkpoint
goes, and does not check who may write a slot.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
import torch
from typing_extensions import Self

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.snapshots.headroom import least_headroom
from grpo_run.runtime.upstream import tensor_files
from grpo_run.runtime.upstream.patches import override_attributes

CHUNK_BYTES = 16 << 20
"""Bytes per call of the kernel. Calls must be short, because a signal restarts them."""
GRANTED_BYTES = 64 << 20
"""The headroom is measured again whenever a file has grown by this much."""
DEVICES = frozenset({"cpu", "cuda"})
"""Device types whose tensors have plain bytes."""
HEADER_ALIGNMENT_BYTES = 8
"""safetensors pads its header with spaces to a multiple of this."""


class ReusedFile:
    """A file that is written from its beginning, over the memory that it has.

    A failed write is noted and not raised: torch's writer cannot be left in the middle of an archive, and
    other ranks may wait in a collective of the same save. Everything after it is dropped.

    Args:
        path: of the file; created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._position = 0
        # a spare file has no holes
        self._granted_bytes = os.fstat(self._descriptor).st_size
        self.failure: OSError | NoHeadroomError | None = None
        """Why the file is not complete."""

    def write(self, data: Any) -> int:
        """Append bytes. Other threads run meanwhile."""
        with memoryview(data) as given, given.cast("B") as view:
            if self.failure is None:
                try:
                    self._write(view)
                except (OSError, NoHeadroomError) as error:
                    self.failure = error
            return len(view)

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + CHUNK_BYTES]
            missing_bytes = self._position + len(part) - self._granted_bytes
            if missing_bytes > 0:
                grant_memory(self._path.parent, missing_bytes)
                self._granted_bytes += missing_bytes + GRANTED_BYTES
            count = os.pwrite(self._descriptor, part, self._position)
            self._position += count
            done += count

    def flush(self) -> None:
        """Do nothing; torch requires the method."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            os.ftruncate(self._descriptor, self._position)
        finally:
            os.close(self._descriptor)


def grant_memory(folder: Path, size_bytes: int) -> None:
    """Check that a file in `folder` may grow by `size_bytes`.

    The kernel kills a process that exceeds its memory limit, so there is no error to handle later.

    Raises:
        NoHeadroomError: names the limit.
    """
    headroom = least_headroom(folder)
    if size_bytes > headroom.usable_bytes:
        raise NoHeadroomError(f"{folder} needs {size_bytes >> 10} KiB more, but {headroom.sentence}")


def allocate(path: Path, size_bytes: int) -> None:
    """Make a spare file with memory. It takes about one second per gigabyte.

    Raises:
        NoHeadroomError, OSError: there is no memory; the file does not exist.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, size_bytes, GRANTED_BYTES):
            part = min(GRANTED_BYTES, size_bytes - start)
            grant_memory(path.parent, part)
            os.posix_fallocate(descriptor, start, part)
    except (NoHeadroomError, OSError):
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def reuse_files(folder: Path, spare: Path) -> Iterator[None]:
    """Within the block, write what this thread saves below `folder` over the files of `spare`.

    If there is no memory for a file, the block still runs to its end, because other ranks may wait in
    collectives of the same save.

    Args:
        folder: the checkpoint's directory.
        spare: a directory on the same file system with files of an earlier checkpoint; it need not exist.

    Raises:
        NoHeadroomError, OSError: at the end of the block, if there was no memory for a file.
    """
    saves = _Saves(folder, spare)
    with ExitStack() as replaced:
        for names, replacement in (
            (tensor_files.TORCH_SAVE, saves.replaced_torch_save(torch.save)),
            (tensor_files.SAFETENSORS_SAVE, saves.replaced_safetensors_save(safetensors.torch.save_file)),
        ):
            for module_name, name in names:
                # modules that are not imported have nothing to replace, and importing them takes seconds
                module = sys.modules.get(module_name)
                # a script may have replaced the function, with effects of its own
                if tensor_files.is_library_function(getattr(module, name, None)):
                    replaced.enter_context(override_attributes(module, **{name: replacement}))
        try:
            yield
        finally:
            saves.active = False
    if saves.failure is not None:
        raise saves.failure


class _Saves:
    """The saves of one block."""

    def __init__(self, folder: Path, spare: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._spare = spare
        self._thread = threading.get_ident()
        self.active = True
        """Whether the block runs. A module that was imported meanwhile keeps a replaced function."""
        self.failure: OSError | NoHeadroomError | None = None

    def replaced_torch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if (path := self._path(f)) is None:
                original(obj, f, *args, **kwargs)
                return
            with self._reused(path) as file, tensor_files.without_checksums():
                original(obj, file, *args, **kwargs)

        return save

    def replaced_safetensors_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            path, header = self._path(filename), None
            if path is not None:
                # the arguments are not checked before; safetensors raises its own error
                with suppress(Exception):
                    header = safetensors_header(tensors, metadata)
            if path is None or header is None:
                original(tensors, filename, metadata)
                return
            with self._reused(path) as file:
                file.write(header)
                for _, tensor in sorted(tensors.items(), key=_sort_key):
                    file.write(_bytes_of(tensor))

        return save_file

    def _path(self, target: Any) -> Path | None:
        """Return the file if it is one of this block's; None if the library must write it."""
        mine = self.active and threading.get_ident() == self._thread
        if not mine or not isinstance(target, (str, os.PathLike)):
            return None
        name = os.fspath(target)
        if not isinstance(name, str):
            return None
        parent, file = os.path.split(os.path.abspath(name))
        path = Path(os.path.realpath(parent), file)
        if not path.parent.is_relative_to(self._folder) or path.is_symlink() or path.is_dir():
            return None
        return path if path.parent.is_dir() else None  # else the library raises its own error

    @contextmanager
    def _reused(self, path: Path) -> Iterator[ReusedFile]:
        if not path.exists():
            spare = self._spare / path.relative_to(self._folder)
            if not spare.exists():  # DeepSpeed writes into a folder that is named after the step
                spare = next((one for one in self._spare.rglob("*") if one.name == path.name), spare)
            if spare.is_file() and not spare.is_symlink():
                with suppress(FileNotFoundError):  # another rank has taken it
                    spare.rename(path)
        with ReusedFile(path) as file:
            yield file
        self.failure = self.failure or file.failure


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu()
    start = plain.storage_offset() * plain.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(
        plain.untyped_storage(),  # type: ignore[call-overload, unused-ignore]
        start,
        (plain.nbytes,),
    )
    return memoryview(flat.numpy())


def safetensors_header(tensors: Any, metadata: Mapping[str, str] | None) -> bytes | None:
    """Return what stands before the tensors in the file that safetensors would write, or None if it must
    write it.

    safetensors writes several metadata entries in random order; here they keep their order, which is one of
    those.
    Sources: the README of huggingface/safetensors for the format; the function `prepare` in its
    `safetensors/src/tensor.rs` for the order (type, then name) and the padding.

    Raises:
        Exception: safetensors does not accept the arguments.
    """
    tensor_files.check_safetensors(tensors)
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
        end = position + tensor.nbytes
        content[name] = {
            "dtype": tensor_files.SAFETENSORS_TYPES[_type_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


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
        and tensor.storage_offset() * tensor.element_size() + tensor.nbytes
        <= tensor.untyped_storage().nbytes()
    )


def _type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_TYPE_ORDER = {name: position for position, name in enumerate(tensor_files.SAFETENSORS_TYPES)}


def _sort_key(item: tuple[str, torch.Tensor]) -> tuple[int, str]:
    """Return the sort key of a tensor in the file; Rust sorts names by UTF-8 bytes, like code points."""
    name, tensor = item
    return _TYPE_ORDER[_type_name(tensor)], name
