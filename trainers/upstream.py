"""Every private name of transformers, TRL and torch that the guard leans on, and the versions it was tested with.

One place, so that a contract test (`tests/unit/trainers/test_upstream.py`) says at once what a new release moved.
Read by whoever in `trainers` needs one, and by `cli.launch`. Importing it imports none of those libraries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from grpo_run.runtime.errors import UntestedVersionError

TESTED = {
    "torch": SpecifierSet(">=2.13,<2.14"),
    "transformers": SpecifierSet(">=5.23,<5.24"),
    "trl": SpecifierSet(">=1.16,<1.17"),
    "accelerate": SpecifierSet(">=1.15,<1.16"),
}

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer method (model, trial): writes one checkpoint, a collective under DeepSpeed and FSDP."""
OUTPUT_DIR = "_get_output_dir"
"""Trainer method (trial): the directory in which a checkpoint's directory is made."""
AFTER_STEP = "_maybe_log_save_evaluate"
"""Trainer method, called after each optimizer step and at an epoch's end: logs, evaluates, saves."""
RUN_EPOCH = "_run_epoch"
"""Trainer method: one pass over the data; replaced to restore a finished call without training."""
GENERATE_AND_SCORE = "_generate_and_score_completions"
GENERATE = "_generate"
CALCULATE_REWARDS = "_calculate_rewards"
"""GRPO and RLOO methods, wrapped as they are and never unpacked."""
LOAD_RNG = "_load_rng_state"
"""Trainer method (checkpoint): loads this rank's random number generators."""
FINALIZE = "_finalize_training"
"""Trainer method (trial, num_train_samples, start_time): the average loss and speed of a call."""
PENDING_LOSS = "_tr_loss"
TOTAL_LOSS = "_total_loss_scalar"
LAST_LOGGED_STEP = "_globalstep_last_logged"
FIRST_STEP = "_initial_global_step"
"""Trainer attributes, set when a call's loop begins: what the next log line and the final average are made of."""
TRAINER_ATTRIBUTES = (PENDING_LOSS, TOTAL_LOSS, LAST_LOGGED_STEP, FIRST_STEP)
MICRO_STEP = "_step"
BUFFERED_INPUTS = "_buffered_inputs"
"""GRPO and RLOO attributes: forward passes so far, and the micro-batches of the rollout in use."""
METRICS = "_metrics"
COMPLETION_LOGS = "_logs"
TABLES = (METRICS, COMPLETION_LOGS, "_pending_extra_logs", "_pending_metrics")
"""GRPO and RLOO attributes (SFT has the first): what is gathered for the next log line."""
TRAIN_TOKENS = "_total_train_tokens"
"""SFT, GRPO and RLOO attribute, a number that grows; SFT logs it."""
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
"""Methods of torch's ProcessGroup that issue one collective of the group's sequence; what a release lacks is not wrapped."""
OUTPUT_FIRST = frozenset(COLLECTIVE_METHODS) - {
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
}
"""Of these, the ones called as (outputs, inputs)."""
GROUP_SEQUENCE = "_get_sequence_number_for_group"
"""ProcessGroup and backend method: how many collectives the group has been given."""
WORKER_SERVER = "_WorkerServer"
"""Torch's HTTP server on a unix socket, answering from C++ threads."""


def sequence_number(group: Any) -> int:
    """How many collectives a process group (or backend) has been given by this rank."""
    return int(getattr(group, GROUP_SEQUENCE)())


def check_versions(*, allow_untested: bool, tested: dict[str, SpecifierSet] | None = None) -> list[str]:
    """Compare what is installed with what was tested.

    Returns:
        With `allow_untested`, a sentence for each library outside its range.

    Raises:
        UntestedVersionError: a library is missing, or outside its range and that was not allowed.
    """
    strange = []
    for name, range_ in (tested or TESTED).items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UntestedVersionError(f"{name} is not installed; install {name}{range_}") from None
        if not range_.contains(found.split("+")[0], prereleases=True):
            strange.append(f"{name} {found} is outside the tested range {range_}")
    if strange and not allow_untested:
        raise UntestedVersionError(
            "; ".join(strange) + "; install a tested version, or go on with --allow-untested"
        )
    return strange


# ---- what writes tensors to files, for `interception.py` and `packing.py` ----

TORCH_SAVE = (("torch", "save"), ("torch.serialization", "save"))
"""Where `torch.save` is looked up by those who call it: module and name."""
SAFETENSORS_SAVE = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("transformers.integrations.accelerate", "save_file"),
    ("accelerate.utils.other", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
"""The same for `safetensors.torch.save_file`, of which some keep a name of their own."""
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
"""Torch's types and safetensors' names for them, in the order in which safetensors lays them out in a file."""


def archive_records(
    obj: Any, pickle_module: Any, protocol: int, disable_byteorder_record: bool
) -> list[tuple[str, bytes | int]]:
    """The records of the archive that `torch.save` would write, in order: their bytes, or for a storage its size.

    Raises:
        Exception: whatever pickling raises; and RuntimeError for tensors that torch cannot pickle without
            touching their data (quantized, nested).
    """
    import torch

    records: list[tuple[str, bytes | int]] = []

    class Writer:
        """As much of torch's PyTorchFileWriter as `_save` uses."""

        def write_record(self, name: str, data: bytes | str, size: int) -> None:
            records.append((name, data.encode() if isinstance(data, str) else data))

        def write_record_metadata(self, name: str, size: int) -> None:
            records.append((name, size))

    save: Any = torch.serialization._save
    with torch.serialization.skip_data():
        save(obj, Writer(), pickle_module, protocol, disable_byteorder_record)
    return records


def archive_settings() -> tuple[bool, int]:
    """Whether `torch.save` computes checksums, and to how many bytes it aligns storages."""
    from torch.utils.serialization import config

    return config.save.compute_crc32, config.save.storage_alignment


def skips_data() -> bool:
    """Whether the caller has told torch to leave the storages' bytes out."""
    import torch

    return bool(torch.serialization._serialization_tls.skip_data)


def check_safetensors(tensors: Any) -> None:
    """Safetensors' own checks before it writes: names, kinds, layouts, shared memory.

    Raises:
        ValueError: not a dictionary of dense tensors.
        RuntimeError: tensors share memory.
    """
    from safetensors.torch import _evaluate_tensors_for_save

    _evaluate_tensors_for_save(tensors)


def collective_save_error() -> type[BaseException]:
    """What torch's distributed checkpoint raises on every rank when one could not write; it is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def save_errors(error: BaseException) -> list[BaseException]:
    """What a save failed of: the error itself, or each rank's that a `collective_save_error` has collected."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return [error]
    return [cause for cause, _ in error.failures.values()]


def local_part(parameter: Any) -> Any:
    """What this rank holds of a parameter: under ZeRO-3 (`ds_tensor`) and as a DTensor only a part of it.

    Neither copied nor detached.
    """
    part = getattr(parameter, "ds_tensor", parameter)
    return part.to_local() if hasattr(part, "to_local") else part
