"""`--accelerate-config FILE`: the parallelism mode of a run, taken from an accelerate configuration file.

`load_parallelism` is called once by `grpo-run launch`, before any rank is started: it says how many ranks a node
gets and what to add to their environment, so that a script behaves as under `accelerate launch --config_file
FILE`. `check_took_effect` is called inside a rank, once its trainer has an accelerator. A setting that would be
dropped without a word is refused here. Rendezvous is not taken from the file (`main_process_ip`, `machine_rank`,
`rdzv_backend` and their like): `grpo-run launch` has its own flags for it.

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
    """What a configuration file asks for.

    Args:
        kind: how the model is spread over the ranks.
        environment: what to add to the launcher's own environment in every rank. What torch elastic sets (RANK,
            MASTER_ADDR and their like) is not in it, nor what the launcher already has with the same value.
        ranks_per_node: ranks to start on every node.
        expected_distributed_type: accelerate's `DistributedType` that `check_took_effect` must find.
        source: the file.
    """

    kind: Kind
    environment: Mapping[str, str]
    ranks_per_node: int
    expected_distributed_type: str
    source: Path


def load_parallelism(
    path: Path,
    *,
    nproc_per_node: int | None,
    nnodes: int,
    has_accelerator: bool,
    allow_ineffective: bool = False,
) -> Parallelism:
    """Read the file and ask accelerate what it means for the ranks.

    Args:
        path: what `accelerate launch --config_file` would be given.
        nproc_per_node: ranks a node as asked for on the command line; None takes them from the file.
        nnodes: nodes of the run; with elastic ones, the fewest.
        has_accelerator: whether this node has a GPU that torch can use.
        allow_ineffective: go on where a setting would not take effect, for tests and experiments.

    Raises:
        ConfigError: the file cannot be read or is malformed, asks for more processes than there would be, is
            refused by accelerate, or has a setting that would not take effect.
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
    )


def ranks_per_node(path: Path, file: AccelerateFile, *, nproc_per_node: int | None, nnodes: int) -> int:
    """How many ranks a node gets: the command line's number, else the file's.

    Raises:
        ConfigError: there is no number, or fewer processes would run than the file counts on: a sharded model
            that fits on eight GPUs need not fit on four.
    """
    if file.kind == "no":
        if (nproc_per_node or 1) * nnodes > 1:
            raise ConfigError(
                f"{path}: distributed_type NO trains in one process, {(nproc_per_node or 1) * nnodes} were asked for;"
                " write MULTI_GPU, or MULTI_CPU with use_cpu: true, or start one"
            )
        return 1
    if file.num_processes == NUM_PROCESSES_UNSET:
        if nproc_per_node is None:
            raise ConfigError(f"{path}: no num_processes; add it, or give --nproc-per-node")
        return nproc_per_node
    ranks = file.num_processes // file.num_machines if nproc_per_node is None else nproc_per_node
    if ranks * nnodes < file.num_processes:
        raise ConfigError(
            f"too few processes for the accelerate config: {path} says num_processes {file.num_processes} on"
            f" num_machines {file.num_machines}, and {ranks} a node on {nnodes} node(s) makes {ranks * nnodes};"
            " start more with --nproc-per-node or --nnodes, or lower num_processes in the file"
        )
    return ranks


def check_took_effect(expected: str, accelerator: Any, *, world_size: int | None = None) -> None:
    """Inside a rank: stop unless accelerate does what the file asked for.

    Args:
        expected: `Parallelism.expected_distributed_type`.
        accelerator: the trainer's `accelerate.Accelerator`.
        world_size: the number of ranks that were started; None does not compare it.

    Raises:
        ConfigError: accelerate settled on another type, or on another number of processes.
    """
    found = accelerator.distributed_type.value
    if expected == "NO":  # one rank that was started with LOCAL_RANK set counts as MULTI_GPU or MULTI_CPU
        world_size = 1
    elif found != expected:
        raise ConfigError(
            f"the accelerate config did not take effect: it asks for {expected} and accelerate runs {found};"
            " look for use_cpu, or for parallelism settings of the script itself (TrainingArguments, Accelerator)"
        )
    if world_size is not None and accelerator.num_processes != world_size:
        raise ConfigError(
            f"the accelerate config did not take effect: {world_size} rank(s) were started and accelerate counts"
            f" {accelerator.num_processes}, so each trains alone; on CPU, set use_cpu=True in the training arguments"
        )


def _deepspeed_file(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The DeepSpeed file by its full path, so that a script that changes directory still finds it."""
    named = environment.get(DEEPSPEED_FILE)
    if named is None or named == "none":
        return {}
    if not Path(named).is_file():
        raise ConfigError(f"{path}: deepspeed_config_file {named}: no such file (from {Path.cwd()})")
    return {DEEPSPEED_FILE: str(Path(named).resolve())}
