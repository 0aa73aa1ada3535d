"""Functions and private names by which torch and safetensors write and read files of tensors.

Used by `runtime/rank/saving`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
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
SAFETENSORS_TYPES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Torch's dtypes and safetensors' names for them, in the order in which safetensors stores them in a file."""


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Within the block, `torch.save` writes no CRC-32 of records, which take most of its time. `torch.load`
    reads none.
    """
    import torch

    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(computes)


@functools.cache
def accept_numbered_cpus() -> None:
    """Let `torch.load` take `cpu:0` as a place, once for this process.

    accelerate numbers the CPU like any device, and transformers before 5.18 loads the optimizer of
    several ranks to the numbered one, which torch refuses.
    """
    import torch

    def restored(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(100, lambda storage: None, restored)


def is_library_function(function: Any) -> bool:
    """Return whether a function of torch or safetensors is the library's own, not one that a script put in
    its place.
    """
    return getattr(function, "__module__", None) in (
        "torch.serialization",
        "safetensors.torch",
    ) and not hasattr(function, "__wrapped__")


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
