"""`--accelerate-config FILE`: take the parallelism of a run from an accelerate configuration file.

`grpo-run launch` calls `load_parallelism` once, before any rank starts. It returns the number of ranks per
node and the environment that makes a script behave as under `accelerate launch --config_file FILE`. A rank
calls `check_took_effect` once its trainer has an accelerator. Settings that accelerate would silently ignore
are refused. Settings of the rendezvous (`main_process_ip`, `machine_rank`, `rdzv_backend` and others) are not
read from the file, because `grpo-run launch` has its own options for them.

Importing this module imports neither torch nor accelerate; `load_parallelism` imports both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch import accelerate_environment
from grpo_run.runtime.launch.accelerate_effect import ineffective
from grpo_run.runtime.launch.accelerate_file import NUM_PROCESSES_UNSET, AccelerateFile, read

Kind = Literal["ddp", "fsdp", "deepspeed", "no"]
DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallelism that a configuration file asks for.

    Args:
        kind: how the model is distributed over the ranks.
        environment: variables to add to the launcher's environment in every rank, without those that torch
            elastic sets (RANK, MASTER_ADDR and others) and those that the launcher has with the same value.
        ranks_per_node: number of ranks to start on every node.
        expected_distributed_type: accelerate's `DistributedType` that `check_took_effect` expects.
        source: the file.
        replaced: what the command line replaces of the file, as a sentence; "" for nothing.
    """

    kind: Kind
    environment: Mapping[str, str]
    ranks_per_node: int
    expected_distributed_type: str
    source: Path
    replaced: str = ""


def load_parallelism(
    path: Path,
    *,
    nproc_per_node: int | None,
    nnodes: int,
    has_accelerator: bool,
    allow_ineffective: bool = False,
) -> Parallelism:
    """Read the file and compute the environment of the ranks with accelerate's own functions.

    Args:
        path: the file that `accelerate launch --config_file` would read.
        nproc_per_node: ranks per node from the command line, which win; None takes the number from the file.
        nnodes: number of nodes; the smallest if the run is elastic.
        has_accelerator: whether this node has a GPU that torch can use.
        allow_ineffective: accept settings that would not take effect, for tests and experiments.

    Raises:
        ConfigError: the file cannot be read or is malformed, asks for more processes than its number of nodes
            gives, is refused by accelerate, or has a setting that would not take effect.
    """
    file = read(path)
    ranks = ranks_per_node(path, file, nproc_per_node=nproc_per_node, nnodes=nnodes)
    launch = accelerate_environment.compute(
        path, num_processes=ranks * nnodes, num_machines=nnodes, has_accelerator=has_accelerator
    )
    environment = dict(launch.environment)
    if not allow_ineffective:
        reasons = ineffective(
            file,
            environment=environment,
            without_effect=launch.without_effect,
            replaced_in_fsdp2=accelerate_environment.replaced_in_fsdp2() if file.kind == "fsdp" else {},
            ranks_per_node=ranks,
            has_accelerator=has_accelerator,
        )
        if reasons:
            others = f" (and {len(reasons) - 1} more: {'; '.join(reasons[1:])})" if reasons[1:] else ""
            raise ConfigError(f"{path} would not take effect: {reasons[0]}{others}")
    if file.kind == "deepspeed":
        environment |= _deepspeed_file(path, environment)
        accelerate_environment.check_deepspeed(path, environment)
    return Parallelism(
        kind=cast(Kind, file.kind),
        environment=MappingProxyType(
            {name: value for name, value in environment.items() if os.environ.get(name) != value}
        ),
        ranks_per_node=ranks,
        expected_distributed_type=file.distributed_type,
        source=path,
        replaced=f"--nproc-per-node {ranks} replaces num_processes {file.num_processes} of {path}"
        if nproc_per_node is not None and file.num_processes not in (NUM_PROCESSES_UNSET, ranks * nnodes)
        else "",
    )


def ranks_per_node(path: Path, file: AccelerateFile, *, nproc_per_node: int | None, nnodes: int) -> int:
    """Return the number of ranks per node: the command line's if given, otherwise the file's.

    Raises:
        ConfigError: neither gives a number, or, without a number on the command line, fewer processes would run
            than the file expects: a sharded model that fits on eight GPUs may not fit on four.
    """
    if file.kind == "no":
        if (nproc_per_node or 1) * nnodes > 1:
            raise ConfigError(
                f"{path}: distributed_type NO trains in one process, {(nproc_per_node or 1) * nnodes} are requested;"
                " write MULTI_GPU, or MULTI_CPU with use_cpu: true, or start one"
            )
        return 1
    if nproc_per_node is not None:
        return nproc_per_node
    if file.num_processes == NUM_PROCESSES_UNSET:
        raise ConfigError(f"{path}: no num_processes; add it, or use --nproc-per-node")
    ranks = file.num_processes // file.num_machines
    if ranks * nnodes < file.num_processes:
        raise ConfigError(
            f"too few processes for the accelerate config: {path} says num_processes {file.num_processes} on"
            f" num_machines {file.num_machines}, but {ranks} per node on {nnodes} node(s) is {ranks * nnodes};"
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
            f"the accelerate config did not take effect: {world_size} rank(s) were started, but accelerate counts"
            f" {accelerator.num_processes}, so each trains alone; on CPU, set use_cpu=True in the training arguments"
        )


def _deepspeed_file(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the DeepSpeed file with its absolute path, so that a script that changes directory finds it."""
    named = environment.get(DEEPSPEED_FILE)
    if named is None or named == "none":
        return {}
    if not Path(named).is_file():
        raise ConfigError(f"{path}: deepspeed_config_file {named}: no such file (from {Path.cwd()})")
    return {DEEPSPEED_FILE: str(Path(named).resolve())}
