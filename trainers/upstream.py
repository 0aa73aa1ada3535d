"""Private names of transformers, TRL, torch, safetensors and Python that `trainers` uses; version checks.

All such names are here, so that a contract test (`tests/unit/trainers/test_upstream.py`) reports what a new
release changed. Used throughout `trainers`, and by `cli` for the version check. Importing this module imports
none of the libraries.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_run.runtime.errors import UntestedVersionError

DISTRIBUTION = "grpo-run"
"""Name of this project's own distribution, whose requirements are the tested versions."""
CHECKED_LIBRARIES = ("torch", "transformers", "trl", "accelerate")
"""Libraries whose private names are used, so that a version outside the tested range may break a run."""

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer method (model, trial): write one checkpoint. Collective under DeepSpeed and FSDP."""
OUTPUT_DIR = "_get_output_dir"
"""Trainer method (trial): return the parent directory of checkpoint directories."""
AFTER_STEP = "_maybe_log_save_evaluate"
"""Trainer method, called after each optimizer step and at the end of an epoch: log, evaluate, save."""
RUN_EPOCH = "_run_epoch"
"""Trainer method: train one epoch. Replaced to restore a finished call without training."""
GENERATE_AND_SCORE = "_generate_and_score_completions"
GENERATE = "_generate"
CALCULATE_REWARDS = "_calculate_rewards"
"""GRPO and RLOO methods; wrapped to mark their phases."""
LOAD_RNG = "_load_rng_state"
"""Trainer method (checkpoint): load the state of this rank's random number generators."""
FINALIZE = "_finalize_training"
"""Trainer method (trial, num_train_samples, start_time): compute the average loss and speed of a call."""
PENDING_LOSS = "_tr_loss"
TOTAL_LOSS = "_total_loss_scalar"
LAST_LOGGED_STEP = "_globalstep_last_logged"
FIRST_STEP = "_initial_global_step"
"""Trainer attributes that are reset when training starts; the next log line and the final average use them.
"""
TRAINER_ATTRIBUTES = (PENDING_LOSS, TOTAL_LOSS, LAST_LOGGED_STEP, FIRST_STEP)
MICRO_STEP = "_step"
BUFFERED_INPUTS = "_buffered_inputs"
"""GRPO and RLOO attributes: the number of forward passes so far, and the micro-batches of the current
rollout."""
METRICS = "_metrics"
COMPLETION_LOGS = "_logs"
TABLES = (METRICS, COMPLETION_LOGS, "_pending_extra_logs", "_pending_metrics")
"""GRPO and RLOO attributes that collect values for the next log line. SFT has the first."""
TRAIN_TOKENS = "_total_train_tokens"
"""SFT, GRPO and RLOO attribute: a running count of tokens, which SFT logs."""
TRAINER_METHODS = (SAVE_CHECKPOINT, OUTPUT_DIR, AFTER_STEP, RUN_EPOCH)
ROLLOUT_METHODS = (GENERATE_AND_SCORE, GENERATE, CALCULATE_REWARDS)

COLLECTIVE_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""ProcessGroup methods that issue one collective and advance the group's sequence number.

A method that the installed release does not have is not wrapped.
"""
OUTPUT_FIRST = frozenset(COLLECTIVE_METHODS) - {
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
}
"""Collective methods whose first two arguments are (outputs, inputs)."""
UNRECORDED_METHODS = ("send", "recv", "recv_anysource", "monitored_barrier")
"""ProcessGroup methods that the Flight Recorder does not record."""
GROUP_SEQUENCE = "_get_sequence_number_for_group"
"""ProcessGroup and backend method: return the number of collectives issued on the group."""
WORKER_SERVER = "_WorkerServer"
"""Torch's HTTP server on a unix socket. It answers from C++ threads."""
REGISTER_HANDLER = "_register_handler"
"""Torch's function (name, handler): let the worker server call a Python function (request, response)."""
RUN_BACKWARD = "_engine_run_backward"
"""Function of `torch.autograd.graph` that calls autograd's engine."""
THREAD_TARGET = "_target"
"""Attribute of `threading.Thread`: the function that it runs."""
IDLE_WORKER = "work_queue.get(block=True)"
"""Source of the line at which an idle thread of a `ThreadPoolExecutor` waits (`concurrent.futures.thread._worker`).
"""


_read_sequence = operator.methodcaller(GROUP_SEQUENCE)  # half the time of `getattr` and a call


def sequence_number(group: Any) -> int:
    """Return how many collectives this rank has issued on a process group or backend."""
    return int(_read_sequence(group))


RUNNING_THREADS = "_active"
"""Attribute of `threading`: the running threads by identifier. `threading.enumerate` takes a lock."""
EVENT_CONDITION = "_cond"
CONDITION_WAITERS = "_waiters"
"""Attributes of an event and of its condition: the locks of the threads that wait."""


def running_threads() -> list[threading.Thread]:
    """Return Python's threads without taking a lock; empty if this Python stores them elsewhere."""
    return list(getattr(threading, RUNNING_THREADS, {}).values())


def has_waiter(event: Any) -> bool:
    """Whether a thread waits for a `threading.Event`; False if this Python stores that elsewhere."""
    return bool(getattr(getattr(event, EVENT_CONDITION, None), CONDITION_WAITERS, ()))


def uncounted_numbers(method: str, group_rank: int, group_size: int) -> int:
    """Return by how many more a call advances a Gloo group's sequence number than the Flight Recorder's.

    Each send and receive advances the group's alone. A monitored barrier advances the recorder's by two, and
    is made of two sends or receives between the group's first rank and each other one.

    Args:
        method: one of `UNRECORDED_METHODS`.
        group_rank: this rank's number in the group.
    """
    if method != "monitored_barrier":
        return 1
    return 2 * (group_size - 1) - 2 if group_rank == 0 else 0


def tested_versions() -> dict[str, SpecifierSet]:
    """Return the tested version range of each checked library, as this project's own requirements declare it.

    Raises:
        PackageNotFoundError: the project is not installed.
    """
    requirements = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    ranges = {one.name: one.specifier for one in requirements if one.marker is None}
    return {name: ranges[name] for name in CHECKED_LIBRARIES}


def check_versions(*, allow_untested: bool, tested: Mapping[str, SpecifierSet] | None = None) -> list[str]:
    """Compare the installed versions with the tested ranges.

    Args:
        tested: the ranges by library; those of `tested_versions` if not given.

    Returns:
        With `allow_untested`, one sentence for each library outside its range.

    Raises:
        UntestedVersionError: a library is missing, or is outside its range and `allow_untested` is not set.
    """
    outside = []
    for name, range_ in (tested_versions() if tested is None else tested).items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise UntestedVersionError(f"{name} is not installed; install {name}{range_}") from None
        if not range_.contains(installed.split("+")[0], prereleases=True):
            outside.append(f"{name} {installed} is outside the tested range {range_}")
    if outside and not allow_untested:
        raise UntestedVersionError(
            "; ".join(outside) + "; install a tested version, or pass --allow-untested to use this one"
        )
    return outside


@contextmanager
def replaced_batch_sampler(loader: Any, sampler: Any) -> Iterator[None]:
    """Let the iterators that a `DataLoader` makes within the block use another batch sampler.

    `DataLoader` keeps it in an attribute that it refuses to set again, and reads it when it makes an iterator.
    """
    own = vars(loader)["batch_sampler"]
    vars(loader)["batch_sampler"] = sampler
    try:
        yield
    finally:
        vars(loader)["batch_sampler"] = own


# ---- functions that write tensors to files, for `capture` ----

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
