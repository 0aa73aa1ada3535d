"""Find settings of an accelerate configuration that would not take effect, and the reasons.

accelerate silently ignores several settings: FSDP on CPU becomes DDP, `use_cpu` is not read with DeepSpeed or
FSDP, and the section of another mode is not read. A run that should be sharded and is not runs out of memory
hours later, so grpo-run refuses to start it. Called by `accelerate.load_parallelism`. Pure: reads no file and
no environment, and imports neither torch nor accelerate. References to source files are to accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from grpo_run.runtime.launch.accelerate_file import AccelerateFile

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
