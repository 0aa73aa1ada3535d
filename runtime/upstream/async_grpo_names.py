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


LOOP_ARGUMENTS = "_loop_kwargs"
"""Attribute of TRL's own worker: what its process is started with, among it `DATASET` and `FIRST_PROMPT`, the
position in the data set of the first prompt that it draws."""
DATASET, FIRST_PROMPT = "dataset", "dataset_start_index"
GROUPS_BEFORE = "_groups_before_resume"
"""Trainer attribute: how many prompts were trained before the call went on, for the end of the last epoch."""


def draws(worker: Any) -> tuple[Any, int] | None:
    """Return the data set that TRL's own worker draws from and the position of the first prompt that it is to
    draw; None if the worker is another, or has no data set.
    """
    arguments = getattr(worker, LOOP_ARGUMENTS, {})
    dataset = arguments.get(DATASET)
    return None if dataset is None else (dataset, int(arguments.get(FIRST_PROMPT, 0)))


def draw_from(worker: Any, dataset: Any, first: int) -> None:
    """Let TRL's worker draw from a data set when it starts."""
    getattr(worker, LOOP_ARGUMENTS).update({DATASET: dataset, FIRST_PROMPT: first})


def set_trained(trainer: Any, prompts: int) -> None:
    """Say how many prompts were trained before the call goes on."""
    setattr(trainer, GROUPS_BEFORE, prompts)


def samples_of(examples: Any) -> list[Any]:
    """Return the samples of a micro-batch as the collator gets it: rows for each rank, with their samples."""
    return [sample for rows in examples for row in rows for sample in row.samples]
