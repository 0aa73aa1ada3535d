"""The closed set of causes of a failure, and where an exception of a script comes from.

A cause is a metric label, a journal field and the title of a report, so the set is closed: a failure that
cannot be classified is `unknown`. The origin of an exception is the script's own code, files, the network,
a device, or wrong usage. It decides how patiently a failure is retried: an unreachable hub comes back, an
error in the code does not. Which cause applies is decided in `watchdog/diagnosis/`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.text import TextEnum


class Cause(TextEnum):
    """Why a run was interrupted. The value is written to journals and metric labels."""

    exception = "exception"
    signal = "signal"
    startup_failure = "startup_failure"
    collective_mismatch = "collective_mismatch"
    collective_missing_rank = "collective_missing_rank"
    rank_exited_early = "rank_exited_early"
    generation_stall = "generation_stall"
    reward_stall = "reward_stall"
    data_stall = "data_stall"
    checkpoint_stall = "checkpoint_stall"
    interpreter_stuck = "interpreter_stuck"
    gpu_oom = "gpu_oom"
    host_oom = "host_oom"
    shm_full = "shm_full"
    disk_full = "disk_full"
    checkpoint_corrupt = "checkpoint_corrupt"
    rollout_server_dead = "rollout_server_dead"
    rollout_server_stuck = "rollout_server_stuck"
    weight_sync_stuck = "weight_sync_stuck"
    rollout_stale = "rollout_stale"
    nonfinite = "nonfinite"
    learning_collapse = "learning_collapse"
    replicas_differ = "replicas_differ"
    no_progress = "no_progress"
    stopped = "stopped"
    node_lost = "node_lost"
    unknown = "unknown"


class Origin(TextEnum):
    """Where an exception comes from. The values appear in the journal."""

    code = "code"
    files = "files"
    network = "network"
    device = "device"
    """A device, or the library that connects devices or ranks."""
    usage = "usage"
    """No restart can help: the script cannot be compiled, refuses its arguments, or the user wants no
    restart.
    """


NETWORK_LIBRARIES = frozenset(
    {
        "aiohttp", "botocore", "google.api_core", "grpc", "httpcore", "httpx", "huggingface_hub", "requests",
        "urllib3", "wandb", "websockets",
    }
)  # fmt: skip
"""Packages whose own exception classes report requests that failed."""
NETWORK_ERRORS = frozenset(
    {
        "builtins.ConnectionError", "builtins.TimeoutError", "socket.gaierror", "ssl.SSLError",
        "urllib.error.URLError",
        "http.client.HTTPException",
    }
)  # fmt: skip
TORCH_NETWORK_ERRORS = frozenset({"DistNetworkError", "DistStoreError"})
FILE_ERROR = "builtins.OSError"
DEVICE_ERRORS = frozenset({"torch.AcceleratorError", "torch.distributed.DistError"})
DEVICE_MESSAGE = re.compile(
    r"(?:CUDA|HIP|XPU|NPU|MUSA|cu[A-Z]\w+|hip[A-Z]\w+|MIOpen|NCCL|RCCL)(?: driver| runtime)? [Ee]rror\b"
    r"|\[[^\n]*(?:\bgloo/|Watchdog caught collective operation timeout)"
)
"""Beginnings of the messages of torch's `RuntimeError` for devices and for communication between ranks."""
FINAL_ERRORS = {
    "builtins.SyntaxError": "the code cannot be compiled",
    "grpo_run.runtime.errors.RewardError": "the reward functions return no valid reward",
    "grpo_run.runtime.errors.ResumeMismatchError": "--require-resume is set",
}
USAGE_EXIT_CODE = 2
"""argparse exits with it after printing how the script is called."""


def is_expired_limit(classes: Iterable[str]) -> bool:
    """Whether an exception says that a time limit has expired.

    Args:
        classes: names of its class and its bases, with or without their modules.
    """
    return any("timeout" in name.rpartition(".")[2].lower() for name in classes)


def origin_of(exit: Exit, *, starting: bool) -> tuple[Origin, str]:
    """Return where the failure of a rank comes from, and for `usage` why no restart can help.

    Args:
        starting: it failed outside the steps of a `train()` call.
    """
    error = exit.error
    if error is None:
        return Origin.code, ""
    if starting and error.type == "SystemExit" and exit.exit_code == USAGE_EXIT_CODE:
        return Origin.usage, "the script refuses its arguments"
    for name in error.bases:
        if name in FINAL_ERRORS:
            return Origin.usage, FINAL_ERRORS[name]
    if any(_is_of_network(name) for name in error.bases):
        return Origin.network, ""
    if _is_of_device(exit):
        return Origin.device, ""
    return (Origin.files if FILE_ERROR in error.bases else Origin.code), ""


def _is_of_device(exit: Exit) -> bool:
    error = exit.error
    assert error is not None
    raised = [(error.bases, error.message), *((one.types, one.message) for one in error.chain)]
    return any(
        not DEVICE_ERRORS.isdisjoint(types)
        or ("builtins.RuntimeError" in types and DEVICE_MESSAGE.match(message) is not None)
        for types, message in raised
    )


def _is_of_network(name: str) -> bool:
    parts: Sequence[str] = name.split(".")
    libraries = {".".join(parts[:1]), ".".join(parts[:2])}
    return name in NETWORK_ERRORS or parts[-1] in TORCH_NETWORK_ERRORS or bool(libraries & NETWORK_LIBRARIES)
