"""How libraries report exhausted memory: exception classes, and prefixes of messages.

A message that only mentions memory is no report of it: a reward may quote a server's answer, and a healthy rank may print
one. So a class decides by its full name, and a text only at the beginning of the message, and in an exception that
the library raises. Called by `shortage.py` and by `watchdog.diagnosis.exits`. Pure.

Sources: c10's CUDACachingAllocator.cpp and CUDAException.h, ATen's cublas and cudnn Exceptions.h, NCCL's alloc.h and
checks.h, vLLM's v1/core/kv_cache_utils.py and v1/worker/utils.py, accelerate's utils/memory.py, torch's multiprocessing
and shared memory (aten/src/ATen/MapAllocator.cpp, utils/data/_utils).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from grpo_run.watchdog.causes import Cause


class Source(str, Enum):
    """What has reported that memory is exhausted."""

    allocator = "allocator"
    """torch's allocator of device memory; its message has figures."""
    driver = "driver"
    """A call of CUDA, HIP, Triton or of another driver."""
    library = "library"
    """cuBLAS, cuDNN and the like, for their workspaces."""
    nccl = "nccl"
    vllm = "vllm"
    """An engine of vLLM that found its share of the GPU taken."""
    vllm_cache = "vllm_cache"
    """An engine of vLLM whose share is too small for its KV cache: it needs a larger one."""
    host = "host"
    shared_memory = "shared_memory"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to report exhausted memory: the cause, who reports it, the text that says so, and whether the class says it."""

    cause: Cause
    source: Source
    text: str
    by_class: bool = False


_DEVICES = r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU)"
_RUNTIME_ERROR = "builtins.RuntimeError"
_PATTERNS: tuple[tuple[frozenset[str], Cause, Source, str], ...] = (
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.allocator,
     rf"(?:{_DEVICES}|MPS backend) out of memory\b"),
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.allocator,
     r"NVML_SUCCESS == [^\n]*CUDACachingAllocator\.cpp"),
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.allocator, r"No executable batch size found, reached zero"),
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.driver,
     rf"(?:{_DEVICES}(?: driver| runtime)? error(?: \([^)\n]*\))? ?:|Triton Error \[{_DEVICES}\]:) out of memory\b"),
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.library,
     (r"(?:CUDA|HIP|cu\w+|hip\w+) error: ?(?:(?:CU|HIP)\w+_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)|CUFFT_ALLOC_FAILED"
     r"|CUDNN_STATUS_INTERNAL_ERROR_\w+_ALLOCATION_FAILED)\b")),
    (frozenset({_RUNTIME_ERROR}), Cause.gpu_oom, Source.nccl,
     (r"[^\n]{0,200}\bNCCL\b.*?^(?P<text>[^\n]*(?:(?:Cuda|HIP) failure[^\n]*'out of memory'"
     r"|Failed to CUDA (?:calloc|malloc)[^\n]*))")),
    (frozenset({_RUNTIME_ERROR, "builtins.ValueError"}), Cause.gpu_oom, Source.vllm_cache,
     r"No available memory for the cache blocks\b|To serve at least one request with [^\n]*available KV cache memory"),
    (frozenset({_RUNTIME_ERROR, "builtins.ValueError"}), Cause.gpu_oom, Source.vllm,
     r"Free memory on device\b[^\n]*is less than desired GPU memory utilization"),
    (frozenset({_RUNTIME_ERROR}), Cause.host_oom, Source.host,
     r"\[enforce fail at [^\n]*can't allocate memory\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory\b"),
    (frozenset({_RUNTIME_ERROR}), Cause.host_oom, Source.host,
     r"std::bad_alloc\b|unable to [^\n]*Cannot allocate memory\b"),
    (frozenset({"builtins.OSError"}), Cause.host_oom, Source.host, r"\[Errno 12\]"),
    (frozenset({"builtins.OSError"}), Cause.shm_full, Source.shared_memory, r"\[Errno 28\][^\n]*'/dev/shm/"),
    (frozenset({_RUNTIME_ERROR}), Cause.shm_full, Source.shared_memory,
     r"unable to [\w ()]+ </(?:torch_|dev/shm/)[^>\n]*>[^\n]*No space left on device\b"),
    (frozenset({_RUNTIME_ERROR}), Cause.shm_full, Source.shared_memory,
     r"DataLoader worker \(pid[^)\n]*\)?[^\n]* is killed by signal: Bus error\b"),
    (frozenset({_RUNTIME_ERROR}), Cause.shm_full, Source.shared_memory,
     r"[^\n]{0,200}\bNCCL\b.*?^(?P<text>Error while creating shared memory segment[^\n]*)"),
)  # fmt: skip
"""Full names of base classes, one of which the exception has, and the beginning of its message."""
_COMPILED = tuple(
    (types, cause, source, re.compile(rf"\s*(?:{pattern})", re.IGNORECASE | re.DOTALL | re.MULTILINE))
    for types, cause, source, pattern in _PATTERNS
)
_DEVICE_PACKAGES = frozenset({"torch", "torch_npu", "cupy", "cupy_backends", "intel_extension_for_pytorch"})
_MEMORY_ERROR = "builtins.MemoryError"
_ORIGINAL = "Original Traceback (most recent call last):"
"""torch raises an exception of a worker again with a message that has its traceback."""
_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*): (\S[^\n]*)$", re.MULTILINE)
MAX_TEXT_CHARACTERS = 300


def recognize(types: Collection[str], message: str) -> Spelling | None:
    """Return how an exception reports exhausted memory; None if it does not.

    Args:
        types: full names of its class and its base classes.
        message: its text.
    """
    original = _original(message)
    if any(_is_device_class(name) for name in types):
        return _spelling(Cause.gpu_oom, Source.allocator, original, by_class=True)
    if _MEMORY_ERROR in types:
        return _spelling(Cause.host_oom, Source.host, original or "MemoryError", by_class=True)
    for bases, cause, source, pattern in _COMPILED:
        if bases.isdisjoint(types):
            continue
        found = pattern.match(original)
        if found is not None:
            named = found.groupdict().get("text")
            return _spelling(cause, source, named or original)
    return None


def _is_device_class(name: str) -> bool:
    return name.rpartition(".")[2] in ("OutOfMemoryError", "_OutOfMemoryError") and (
        name.partition(".")[0] in _DEVICE_PACKAGES
    )


def _original(message: str) -> str:
    """The message without what a worker's exception is wrapped in."""
    _, wrapped, traceback = message.partition(_ORIGINAL)
    lines = list(_LAST_LINE.finditer(traceback)) if wrapped else []
    return traceback[lines[-1].start(2) :].strip() if lines else message.strip()


def _spelling(cause: Cause, source: Source, text: str, *, by_class: bool = False) -> Spelling:
    first = text.strip().partition("\n")[0]
    return Spelling(cause, source, first[:MAX_TEXT_CHARACTERS], by_class)
