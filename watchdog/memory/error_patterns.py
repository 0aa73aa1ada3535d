"""How libraries report exhausted memory: exception classes, prefixes of messages, and last output.

A message that only mentions memory is no report: a reward may quote a server's answer, and a healthy rank
may print one. A class is therefore matched by its full name, and a text only at the beginning of a message,
in an exception that the library raises. Output is read for two kinds of failure only: the C++ runtime
aborts on an exception in a thread without Python, and a vLLM engine in its own process prints an exception
of which the rank sees only that the engine has ended. Called by `shortage.py`, `watchdog/diagnosis/` and
`runtime/supervisor/attempt.py`. Pure.

Sources: c10's CUDACachingAllocator.cpp and CUDAException.h, ATen's cublas and cudnn Exceptions.h, NCCL's
alloc.h and checks.h, vLLM's v1/core/kv_cache_utils and v1/worker/utils, accelerate's utils/memory, torch's
multiprocessing and shared memory (aten/src/ATen/MapAllocator.cpp, utils/data/_utils).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Exit, RaisedError, RankError
from grpo_run.watchdog.text import TextEnum


class ErrorSource(TextEnum):
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


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to report exhausted memory: the cause, who reports it, the text that says so, and whether the
    class says it.
    """

    cause: Cause
    source: ErrorSource
    text: str
    by_class: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it can only be this process's memory: by the class, or in the words of a host allocator."""
        return self.by_class or self.cause is Cause.host_oom


_DEVICES = r"(?:CUDA|HIP|XPU|NPU|MUSA|MLU)"
_PATTERNS = {
    (Cause.gpu_oom, ErrorSource.allocator): (
        rf"{_DEVICES} out of memory\b",
        r"NVML_SUCCESS == [^\n]*CUDACachingAllocator\.cpp",
        r"No executable batch size found, reached zero",
    ),
    (Cause.gpu_oom, ErrorSource.driver): (
        rf"{_DEVICES}(?: driver| runtime)? error(?: \([^)\n]*\))? ?: out of memory\b",
        rf"Triton Error \[{_DEVICES}\]: out of memory\b",
    ),
    (Cause.gpu_oom, ErrorSource.library): (
        (
            r"(?:CUDA|HIP|cu\w+|hip\w+) error:"
            r" ?(?:(?:CU|HIP)\w+_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)|CUFFT_ALLOC_FAILED"
            r"|CUDNN_STATUS_INTERNAL_ERROR_\w+_ALLOCATION_FAILED)\b"
        ),
    ),
    (Cause.gpu_oom, ErrorSource.nccl): (
        (
            r"[^\n]{0,200}\bNCCL\b.*?^(?P<text>[^\n]*(?:(?:Cuda|HIP) failure[^\n]*'out of memory'"
            r"|Failed to CUDA (?:calloc|malloc)[^\n]*))"
        ),
    ),
    (Cause.gpu_oom, ErrorSource.vllm_cache): (
        r"No available memory for the cache blocks\b",
        r"To serve at least one request with [^\n]*available KV cache memory",
    ),
    (Cause.gpu_oom, ErrorSource.vllm): (
        r"Free memory on device\b[^\n]*is less than desired GPU memory utilization",
    ),
    (Cause.host_oom, ErrorSource.host): (
        r"\[enforce fail at [^\n]*can't allocate memory\b",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
        r"std::bad_alloc\b",
        r"unable to [^\n]*Cannot allocate memory\b",
        r"\[Errno 12\]",
    ),
    (Cause.shm_full, ErrorSource.shared_memory): (
        r"\[Errno 28\][^\n]*'/dev/shm/",
        r"unable to [\w ()]+ </(?:torch_|dev/shm/)[^>\n]*>[^\n]*No space left on device\b",
        r"DataLoader worker \(pid[^)\n]*\)?[^\n]* is killed by signal: Bus error\b",
        r"[^\n]{0,200}\bNCCL\b.*?^(?P<text>Error while creating shared memory segment[^\n]*)",
    ),
}
"""Beginnings of messages."""
_COMPILED = {
    reports: re.compile(rf"\s*(?:{'|'.join(patterns)})", re.IGNORECASE | re.DOTALL | re.MULTILINE)
    for reports, patterns in _PATTERNS.items()
}
_RUNTIME_ERROR = frozenset({"builtins.RuntimeError"})
_RAISED_AS = {
    ErrorSource.vllm: _RUNTIME_ERROR | {"builtins.ValueError"},
    ErrorSource.vllm_cache: _RUNTIME_ERROR | {"builtins.ValueError"},
    ErrorSource.host: _RUNTIME_ERROR | {"builtins.OSError"},
    ErrorSource.shared_memory: _RUNTIME_ERROR | {"builtins.OSError"},
}
"""Full names of base classes, one of which an exception with such a message has; else `RuntimeError`."""
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
        return _spelling(Cause.gpu_oom, ErrorSource.allocator, original, by_class=True)
    if _MEMORY_ERROR in types:
        return _spelling(Cause.host_oom, ErrorSource.host, original or "MemoryError", by_class=True)
    for (cause, source), pattern in _COMPILED.items():
        if _RAISED_AS.get(source, _RUNTIME_ERROR).isdisjoint(types):
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


def _spelling(cause: Cause, source: ErrorSource, text: str, *, by_class: bool = False) -> Spelling:
    first = text.strip().partition("\n")[0]
    return Spelling(cause, source, first[:MAX_TEXT_CHARACTERS], by_class)


OUTPUT_BYTES = 256 * 1024
"""How much of the end of the output is needed: an engine's traceback is repeated by each process that it has.
"""
_THROWN = re.compile(
    r"^terminate called after throwing an instance of '(?P<type>[^'\n]+)'\n(?:  what\(\): "
    r" (?P<what>[^\n]*))?",
    re.MULTILINE,
)
"""libstdc++'s report (`__verbose_terminate_handler`)."""
_WATCHDOG_PREFIX = re.compile(r"\[[^\]\n]*\][^\n]*?terminated with exception: ")
"""Before the message of an exception that has ended NCCL's watchdog (ProcessGroupNCCL.cpp)."""
_ENGINE_DEAD = re.compile(r"Engine core initialization failed|EngineCore encountered an issue", re.IGNORECASE)
_ENGINE_ERROR = re.compile(
    r"^(?:\((?:EngineCore|Worker|VllmWorker)[^)\n]*\) )?ERROR [^\n]*?\[[\w.]+\.py:\d+\] "
    r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)): (?P<message>[^\n]*)$",
    re.MULTILINE,
)
"""A line of vLLM's log that ends a traceback."""
_BAD_ALLOCATION = "std::bad_alloc"


def needs_output(exit: Exit) -> bool:
    """Whether the output of a rank may say more of its failure than the exit: it was aborted, or its engine
    has ended.
    """
    if exit.error is None:
        return exit.signal == signal.SIGABRT
    return bool(_ENGINE_DEAD.search(exit.error.message))


def reported_in(output: str, exit: Exit, wall_time: float) -> RankError | None:
    """Return the rank's error with the exhausted memory that its output reports; None if it reports none.

    Args:
        output: its end.
        exit: of the rank; `needs_output` is true of it.
        wall_time: when the exit was seen, in seconds since the epoch, for a rank that has left no error.
    """
    found = _of_engine(output) if exit.error is not None else _thrown(output)
    if found is None:
        return None
    if exit.error is None:
        return RankError(
            type=found.types[0].rpartition(".")[2],
            message=found.message,
            traceback="",
            location=None,
            wall_time=wall_time,
            chain=(found,),
        )
    return replace(exit.error, chain=(*exit.error.chain, found))


def _thrown(output: str) -> RaisedError | None:
    """What the C++ runtime says has ended the process."""
    reports = list(_THROWN.finditer(output))
    if not reports:
        return None
    last = reports[-1]
    if last["type"] == _BAD_ALLOCATION:
        return RaisedError(types=("builtins.MemoryError",), message=_BAD_ALLOCATION)
    message = _WATCHDOG_PREFIX.sub("", last["what"] or "", count=1)
    return _if_exhausted(RaisedError(types=("builtins.RuntimeError",), message=message))


def _of_engine(output: str) -> RaisedError | None:
    """The first exhausted memory in the log of an engine; later errors follow from it."""
    for line in _ENGINE_ERROR.finditer(output):
        name = line["type"] if "." in line["type"] else f"builtins.{line['type']}"
        found = _if_exhausted(RaisedError(types=(name,), message=line["message"]))
        if found is not None:
            return found
    return None


def _if_exhausted(raised: RaisedError) -> RaisedError | None:
    return raised if recognize(raised.types, raised.message) is not None else None
