"""`--accelerate-config FILE`: take the parallelism of a run from an accelerate configuration file.

`grpo-run launch` calls `load_parallelism` once, before any rank starts. It returns the number of ranks per
node and the environment that makes a script behave as under `accelerate launch --config_file FILE`, both by
accelerate's own functions (`runtime/upstream/accelerate_launch.py`). A rank calls `check_took_effect` once
its trainer has an accelerator. Settings of the rendezvous (`main_process_ip`, `machine_rank`, `rdzv_backend`
and others) are not read from the file, because `grpo-run launch` has its own options for them.

Importing this module imports neither torch nor accelerate; `load_parallelism` imports both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream import accelerate_launch

LAUNCHED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
"""accelerate's `DistributedType` values that `grpo-run launch` starts."""
NEED_ACCELERATOR: Final = {
    "FSDP": "every rank would hold the whole model (DDP); use DEEPSPEED, which shards on CPU, or MULTI_CPU",
    "MULTI_GPU": "every rank would train alone; write MULTI_CPU and use_cpu: true",
}
"""Types that accelerate replaces where there is no accelerator, and what follows."""
DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallelism that a configuration file asks for.

    Args:
        environment: variables to add to the launcher's environment in every rank, without those that torch
            elastic sets (RANK, MASTER_ADDR and others) and those that the launcher has with the same value.
        ranks_per_node: number of ranks to start on every node.
        expected_distributed_type: accelerate's `DistributedType` that `check_took_effect` expects, if any.
        replaced: what the command line replaces of the file, as a sentence; "" for nothing.
    """

    environment: Mapping[str, str]
    ranks_per_node: int
    expected_distributed_type: str | None = None
    replaced: str = ""


def load_parallelism(
    path: Path, *, nproc_per_node: int | None, nnodes: int, has_accelerator: bool
) -> Parallelism:
    """Read the file and compute the environment of the ranks with accelerate's own functions.

    Args:
        path: the file that `accelerate launch --config_file` would read.
        nproc_per_node: ranks per node from the command line, which win; None takes the number from the file.
        nnodes: number of nodes; the smallest if the run is elastic.
        has_accelerator: whether this node has a GPU that torch can use.

    Raises:
        ConfigError: accelerate refuses the file, it asks for more processes than its number of nodes gives,
            or it has a key that accelerate would not read.
    """
    file = accelerate_launch.read(path)
    for key in ("distributed_type", "mixed_precision"):
        if getattr(file, key) is False:
            raise ConfigError(f"{path}: {key}: YAML reads a bare no as false; write it in quotes")
    kind = str(getattr(file.distributed_type, "value", file.distributed_type))
    if kind not in LAUNCHED:
        raise ConfigError(
            f"{path}: distributed_type {kind} is not started by grpo-run launch; it starts"
            f" {', '.join(LAUNCHED)}"
        )
    ranks = ranks_per_node(
        path, kind, file.num_processes, file.num_machines, nproc_per_node=nproc_per_node, nnodes=nnodes
    )
    launch = accelerate_launch.compute(
        path, num_processes=ranks * nnodes, num_machines=nnodes, has_accelerator=has_accelerator
    )
    reasons = [
        f"{name}: accelerate does not read it with distributed_type {kind}" for name in launch.without_effect
    ]
    if kind in NEED_ACCELERATOR and not has_accelerator:
        reasons.insert(0, f"distributed_type {kind} without an accelerator: {NEED_ACCELERATOR[kind]}")
    if reasons:
        raise ConfigError(f"{path} would not take effect: {'; '.join(reasons)}")
    environment = dict(launch.environment)
    if kind == "DEEPSPEED":
        environment |= _deepspeed_file(path, environment)
        accelerate_launch.check_deepspeed(path, environment)
    return Parallelism(
        environment=MappingProxyType(
            {name: value for name, value in environment.items() if os.environ.get(name) != value}
        ),
        ranks_per_node=ranks,
        expected_distributed_type=kind,
        replaced=f"--nproc-per-node {ranks} replaces num_processes {file.num_processes} of {path}"
        if nproc_per_node is not None and file.num_processes not in (-1, ranks * nnodes)
        else "",
    )


def ranks_per_node(
    path: Path,
    kind: str,
    num_processes: object,
    num_machines: object,
    *,
    nproc_per_node: int | None,
    nnodes: int,
) -> int:
    """Return the number of ranks per node: the command line's if given, otherwise the file's.

    Args:
        path: the file, for messages.
        kind: its `distributed_type`.
        num_processes: what the file says; below 1 if it leaves the number to the command line.
        num_machines: what the file says.
        nproc_per_node: of the command line.
        nnodes: of the command line.

    Raises:
        ConfigError: neither gives a number, or, without a number on the command line, fewer processes would
            run than the file expects: a sharded model that fits on eight GPUs may not fit on four.
    """
    if kind == "NO":
        if (nproc_per_node or 1) * nnodes > 1:
            raise ConfigError(
                f"{path}: distributed_type NO trains in one process, {(nproc_per_node or 1) * nnodes} are"
                " requested; write MULTI_GPU, or MULTI_CPU with use_cpu: true, or start one"
            )
        return 1
    if nproc_per_node is not None:
        return nproc_per_node
    if not isinstance(num_processes, int) or not isinstance(num_machines, int) or num_processes < 1:
        raise ConfigError(f"{path}: no number in num_processes; add it, or use --nproc-per-node")
    ranks = num_processes // max(num_machines, 1)
    if ranks * nnodes < num_processes:
        raise ConfigError(
            f"too few processes for the accelerate config: {path} says num_processes {num_processes} on"
            f" num_machines {num_machines}, but {ranks} per node on {nnodes} node(s) is {ranks * nnodes};"
            " give the number with --nproc-per-node, or start more nodes with --nnodes"
        )
    return ranks


def check_took_effect(expected: str, accelerator: Any, *, world_size: int | None = None) -> None:
    """Check, inside a rank, that accelerate uses the parallelism that the file asks for.

    Args:
        expected: `Parallelism.expected_distributed_type`.
        accelerator: the trainer's `accelerate.Accelerator`.
        world_size: number of ranks that were started; None skips the comparison.

    Raises:
        ConfigError: accelerate uses another type or another number of processes.
    """
    found = accelerator.distributed_type.value
    if expected == "NO":  # with LOCAL_RANK set, accelerate reports a single rank as MULTI_GPU or MULTI_CPU
        world_size = 1
    elif found != expected:
        raise ConfigError(
            f"the accelerate config did not take effect: it asks for {expected}, but accelerate uses {found};"
            " check use_cpu, and parallelism settings in the script (TrainingArguments, Accelerator)"
        )
    if world_size is not None and accelerator.num_processes != world_size:
        raise ConfigError(
            f"the accelerate config did not take effect: {world_size} rank(s) were started, but accelerate"
            f" counts {accelerator.num_processes}, so each trains alone; on CPU, set use_cpu=True in the"
            " training arguments"
        )


def _deepspeed_file(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the DeepSpeed file with its absolute path, so that a script that changes directory finds it."""
    named = environment.get(DEEPSPEED_FILE)
    if named is None or named == "none":
        return {}
    if not Path(named).is_file():
        raise ConfigError(f"{path}: deepspeed_config_file {named}: no such file (from {Path.cwd()})")
    return {DEEPSPEED_FILE: str(Path(named).resolve())}
