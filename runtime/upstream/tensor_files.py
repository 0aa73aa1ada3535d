"""Functions and private names by which torch and safetensors write and read files of tensors.

Used by `capture`, `loading` and `saving`.
"""

from __future__ import annotations

from typing import Any

TORCH_SAVE = (("torch", "save"), ("torch.serialization", "save"))
"""Modules and names under which callers look up `torch.save`."""
SAFETENSORS_SAVE = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("transformers.integrations.accelerate", "save_file"),
    ("accelerate.utils.other", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
"""Modules and names under which callers look up `safetensors.torch.save_file`."""
TORCH_LOAD = (("torch", "load"), ("torch.serialization", "load"))
"""Modules and names under which callers look up `torch.load`."""
SAFETENSORS_LOAD = (
    ("safetensors.torch", "load_file"),
    ("transformers.trainer_utils", "safe_load_file"),
    ("accelerate.utils.modeling", "safe_load_file"),
    ("peft.utils.save_and_load", "safe_load_file"),
)
"""Modules and names under which callers look up `safetensors.torch.load_file`."""
SAFETENSORS_OPEN = (
    ("safetensors", "safe_open"),
    ("safetensors.torch", "safe_open"),
    ("transformers.modeling_utils", "safe_open"),
    ("accelerate.utils.modeling", "safe_open"),
    ("accelerate.utils.offload", "safe_open"),
)
"""Modules and names under which callers look up `safetensors.safe_open`."""
SAFETENSORS_TYPES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Torch's dtypes and safetensors' names for them, in the order in which safetensors stores them in a file."""


def archive_records(
    obj: Any, pickle_module: Any, protocol: int, disable_byteorder_record: bool
) -> list[tuple[str, bytes | int]]:
    """Return the records of the archive that `torch.save` would write, in order.

    Each record is its name and its content; for a storage, its size in bytes instead of the content.

    Raises:
        Exception: whatever pickling raises; RuntimeError for tensors that torch cannot pickle without reading
            their data (quantized, nested).
    """
    import torch

    records: list[tuple[str, bytes | int]] = []

    class Writer:
        """The part of torch's `PyTorchFileWriter` that `_save` uses."""

        def write_record(self, name: str, data: bytes | str, size: int) -> None:
            records.append((name, data.encode() if isinstance(data, str) else data))

        def write_record_metadata(self, name: str, size: int) -> None:
            records.append((name, size))

    save: Any = torch.serialization._save
    with torch.serialization.skip_data():
        save(obj, Writer(), pickle_module, protocol, disable_byteorder_record)
    return records


def archive_settings() -> tuple[bool, int]:
    """Return whether `torch.save` computes checksums, and the alignment of storages in bytes."""
    from torch.utils.serialization import config

    return config.save.compute_crc32, config.save.storage_alignment


def skips_data() -> bool:
    """Return whether the caller has told torch to omit the content of storages."""
    import torch

    return bool(torch.serialization._serialization_tls.skip_data)


def is_library_function(function: Any) -> bool:
    """Return whether a function of torch or safetensors is the library's own, not one that a script put in its place."""
    return getattr(function, "__module__", None) in (
        "torch.serialization",
        "safetensors.torch",
    ) and not hasattr(function, "__wrapped__")


def load_archive(archive: Any, map_location: Any) -> Any:
    """Return what `torch.load(..., weights_only=True)` returns for an archive.

    Args:
        archive: offers the part of torch's `PyTorchFileReader` that `_load` uses.
        map_location: as of `torch.load`.

    Raises:
        pickle.UnpicklingError: the archive contains a type that is not allowed.
    """
    import torch

    load: Any = torch.serialization._load
    return load(archive, map_location, torch._weights_only_unpickler, encoding="utf-8")


def loads_plainly() -> bool:
    """Return whether no mode is active in which `torch.load` returns tensors without memory of their own."""
    import torch
    from torch.utils.serialization import config

    return not skips_data() and not config.load.mmap and torch._guards.detect_fake_mode(None) is None


def check_safetensors(tensors: Any) -> None:
    """Run the checks that safetensors makes before writing: names, types, layouts, shared memory.

    Raises:
        ValueError: not a dictionary of dense tensors.
        RuntimeError: tensors share memory.
    """
    from safetensors.torch import _evaluate_tensors_for_save

    _evaluate_tensors_for_save(tensors)


def collective_save_error() -> type[BaseException]:
    """Return the error that torch's distributed checkpoint raises on every rank if one rank cannot write.

    It derives from `BaseException`, not from `Exception`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def save_errors(error: BaseException) -> list[BaseException]:
    """Return the causes of a failed save: the error, or each rank's in a `collective_save_error`."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return [error]
    return [cause for cause, _ in error.failures.values()]


def local_part(parameter: Any) -> Any:
    """Return this rank's part of a parameter: its ZeRO-3 or DTensor shard, else all of it.

    The result is neither copied nor detached.
    """
    part = getattr(parameter, "ds_tensor", parameter)
    return part.to_local() if hasattr(part, "to_local") else part
