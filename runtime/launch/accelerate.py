"""`--accelerate-config FILE`: take the parallelism of a run from an accelerate configuration file.

`grpo-run launch` calls `load_parallelism` once, before any rank starts. It returns the number of ranks per
node and the environment that makes a script behave as under `accelerate launch --config_file FILE`. A rank
calls `check_took_effect` once its trainer has an accelerator. Settings of the rendezvous
(`main_process_ip`, `machine_rank`, `rdzv_backend` and others) are not read from the file, because
`grpo-run launch` has its own options for them.

Settings that accelerate would silently ignore are refused (`ineffective`, pure): FSDP on CPU becomes DDP,
`use_cpu` is not read with DeepSpeed or FSDP, and the section of another mode is not read. A run that should
be sharded and is not runs out of memory hours later. References to source files are to accelerate 1.15.
Importing this module imports neither torch nor accelerate; `load_parallelism` imports both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch import accelerate_environment
from grpo_run.runtime.launch.accelerate_file import NUM_PROCESSES_UNSET, AccelerateFile, read

SWITCHES: Final = {
    "ACCELERATE_USE_CPU": frozenset({"MULTI_CPU", "NO"}),
    "ACCELERATE_USE_DEEPSPEED": frozenset({"DEEPSPEED"}),
    "ACCELERATE_USE_FSDP": frozenset({"FSDP"}),
    "ACCELERATE_USE_MEGATRON_LM": frozenset[str](),
}
"""Variables that select the mode, and the types with which they may be set (`state.py`, `AcceleratorState`).
"""
OWN_SECTION: Final = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}


def ineffective(
    file: AccelerateFile,
    *,
    environment: Mapping[str, str],
    without_effect: tuple[str, ...],
    replaced_in_fsdp2: Mapping[str, str],
    ranks_per_node: int,
    has_accelerator: bool,
) -> list[str]:
    """Return one sentence per setting that would not take effect; an empty list if all take effect.

    Args:
        file: the parsed file.
        environment: environment of a rank, including inherited variables.
        without_effect: keys that do not change that environment.
        replaced_in_fsdp2: keys that FSDP 2 does not read, and what to do instead.
        ranks_per_node: number of ranks on this node.
        has_accelerator: whether this node has a GPU that torch can use.
    """
    return [
        *_device(file, has_accelerator),
        *_precision(file, has_accelerator),
        *_sections(file, without_effect),
        *_fsdp(file, environment, replaced_in_fsdp2),
        *_inherited(file, environment),
        *_gpus(file, ranks_per_node),
    ]


def _device(file: AccelerateFile, has_accelerator: bool) -> Iterator[str]:
    name = file.distributed_type
    if name == "FSDP" and not has_accelerator:
        yield (
            "distributed_type FSDP: accelerate shards only on an accelerator, and this node has none, so every"
            " rank would hold the whole model (DDP); use DEEPSPEED, which shards on CPU, or MULTI_CPU"
        )
    if name == "MULTI_GPU" and not has_accelerator:
        yield (
            "distributed_type MULTI_GPU: this node has no accelerator, so every rank would train alone;"
            " write MULTI_CPU and use_cpu: true"
        )
    if name == "MULTI_CPU" and not file.use_cpu:
        yield (
            "distributed_type MULTI_CPU: without use_cpu: true accelerate uses an accelerator, and without an"
            " accelerator every rank trains alone; add use_cpu: true"
        )
    if file.use_cpu and (name in ("MULTI_GPU", "FSDP") or (name == "DEEPSPEED" and has_accelerator)):
        yield f"use_cpu: accelerate does not read it with distributed_type {name}; remove it, or write MULTI_CPU"


def _precision(file: AccelerateFile, has_accelerator: bool) -> Iterator[str]:
    on_cpu = file.use_cpu or not has_accelerator
    # accelerator.py: native_amp stays off for fp16 if device.type is "cpu"; DeepSpeed has its own fp16
    if on_cpu and file.mixed_precision == "fp16" and file.kind != "deepspeed":
        yield "mixed_precision fp16: accelerate leaves it off on CPU; write bf16 or 'no'"
    if on_cpu and file.mixed_precision == "fp8":
        yield "mixed_precision fp8: needs an accelerator; write bf16 or 'no'"


def _sections(file: AccelerateFile, without_effect: tuple[str, ...]) -> Iterator[str]:
    unread = set()
    for section, owner in OWN_SECTION.items():
        if getattr(file, section) and file.distributed_type != owner:
            unread.add(section)
            yield f"{section}: read only with distributed_type {owner}, not with {file.distributed_type}; remove it"
    if file.fp8_config and file.mixed_precision != "fp8":
        unread.add("fp8_config")
        yield "fp8_config: read only with mixed_precision fp8; remove it"
    if file.mpirun_config:
        yield "mpirun_config: the ranks are started by grpo-run, not by mpirun; remove it"
    for name in without_effect:
        if name.partition(".")[0] not in unread:
            yield f"{name}: accelerate does not read it with distributed_type {file.distributed_type}; check the spelling"


def _fsdp(
    file: AccelerateFile, environment: Mapping[str, str], replaced_in_fsdp2: Mapping[str, str]
) -> Iterator[str]:
    if file.kind != "fsdp":
        return
    settings = {
        key if key.startswith("fsdp_") else f"fsdp_{key}": value
        for key, value in (file.fsdp_config or {}).items()
    }
    if environment.get("FSDP_VERSION") == "2":
        for key, advice in replaced_in_fsdp2.items():
            if settings.get(key) is not None:
                yield f"fsdp_config.{key}: FSDP 2 does not read it; {advice}"
        return
    # dataclasses.py, FullyShardedDataParallelPlugin: in version 1, the launcher's FSDP_SHARDING_STRATEGY,
    # which is set even if the file has no such key, takes precedence over FSDP_RESHARD_AFTER_FORWARD
    asked, taken = settings.get("fsdp_reshard_after_forward"), environment.get("FSDP_SHARDING_STRATEGY")
    if asked is not None and str(asked).upper() not in (str(taken).upper(), ""):
        yield (
            f"fsdp_config.fsdp_reshard_after_forward {asked}: FSDP 1 uses fsdp_sharding_strategy, which is {taken};"
            " write fsdp_sharding_strategy, or fsdp_version: 2"
        )


def _inherited(file: AccelerateFile, environment: Mapping[str, str]) -> Iterator[str]:
    for name, types in SWITCHES.items():
        on = environment.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
        if on and file.distributed_type not in types:
            yield f"distributed_type {file.distributed_type}: {name} is set in the environment and overrides it; unset it"
    named = (file.deepspeed_config or {}).get("deepspeed_config_file")
    if file.kind == "deepspeed" and not named and "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment:
        yield "deepspeed_config: ACCELERATE_DEEPSPEED_CONFIG_FILE in the environment overrides it; unset it"


def _gpus(file: AccelerateFile, ranks_per_node: int) -> Iterator[str]:
    if file.gpu_ids is None or file.gpu_ids == "all" or file.use_cpu:
        return
    gpus = len(file.gpu_ids.split(","))
    if gpus < ranks_per_node:
        yield f"gpu_ids {file.gpu_ids}: {gpus} for {ranks_per_node} ranks on this node, so ranks would share a GPU"


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
