"""Names of TRL's AsyncGRPO, which trains beside a process that makes its rollouts.

Used by the feature of the rollout server in a rank. `rollout_worker` and what `RolloutWorkerProtocol` lists
are public, the others are not; a contract test says what a release has changed. Contains names, and what
follows from them.
"""

from __future__ import annotations

from typing import Any

WORKER = "rollout_worker"
"""Trainer attribute, on rank 0: what makes the rollouts, with the attribute `BUFFER`, a queue, and the
methods `HEALTH` (seconds), which raises, and `STOP`."""
BUFFER = "rollout_buffer"
HEALTH, STOP = "check_health", "stop"
PROCESS = "_process"
"""Attribute of TRL's own worker: the `multiprocessing.Process` that it has spawned, None before and after."""
ADAPTER_FOLDER = "_lora_dir"
"""Trainer attribute: the folder of the adapters that it sends to the server, by their path."""
SENDS_ADAPTERS = "_lora_sync"
"""Trainer attribute: whether weights are sent as an adapter. Only AsyncGRPO has it."""
CLIENT = "vllm_client"
"""Trainer attribute, on rank 0: the client, whose `server_url` is the server's address."""

ADAPTER = "_lora_name"
"""Trainer attribute: how the names of its adapters begin."""
VERSION = "model_version"
"""Attribute of trainer and sample: the number of a policy."""
STALENESS = "max_staleness"
"""Field of the configuration: by how many policies a sample may be older than the trainer."""


def rollout_process(worker: Any) -> Any | None:
    """Return the process that makes the rollouts; None if there is none now, or the worker is another."""
    return getattr(worker, PROCESS, None)


def forget_process(worker: Any) -> None:
    """Let a worker stop without a word to its process, which has ended."""
    setattr(worker, PROCESS, None)


def adapter_folder(trainer: Any) -> tuple[str, str] | None:
    """Return the server's address and the folder of the adapters; None where the trainer sends none."""
    client = getattr(trainer, CLIENT, None)
    if client is None or not sends_adapters(trainer):
        return None
    return str(client.server_url), str(getattr(trainer, ADAPTER_FOLDER))


def sends_adapters(trainer: Any) -> bool:
    """Whether it sends its weights as an adapter; equal on all ranks."""
    return bool(getattr(trainer, SENDS_ADAPTERS, False))


def policy(trainer: Any) -> str:
    """Return the name under which the trainer has sent its weights last."""
    return f"{getattr(trainer, ADAPTER, '')}-v{getattr(trainer, VERSION)}"


def staleness(trainer: Any) -> int:
    """Return by how many policies a sample may be older than the trainer."""
    return int(getattr(trainer.args, STALENESS))


def is_too_old(trainer: Any, sample: Any) -> bool:
    """Whether the trainer drops a sample."""
    return int(getattr(trainer, VERSION)) - int(getattr(sample, VERSION)) > staleness(trainer)
