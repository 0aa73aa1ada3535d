"""Read an accelerate configuration file, and compute the environment that `accelerate launch` would give each
rank.

Both with accelerate's own functions; some are private or undocumented, and
`tests/unit/runtime/upstream/test_accelerate_contract.py` fails if one of them changes. Called by
`runtime/launch/accelerate.py`. accelerate, and with it torch, is imported inside the functions. Nothing here
uses CUDA, opens a port or starts a process, except `nvidia-smi` on a node with an accelerator.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream.versions import check_extra

SET_BY_ELASTIC: Final = frozenset(
    {
        "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "NODE_RANK", "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
    }
)  # fmt: skip
"""Variables that torch elastic sets for every rank."""
AFFINITY_VARIABLE: Final = "KMP_AFFINITY"
"""accelerate sets it for one process per machine; the same value would pin all ranks to the same cores."""
LAUNCHER_KEYS: Final = frozenset({"deepspeed_multinode_launcher", "deepspeed_hostfile"})
"""Keys about how ranks are started, which grpo-run does itself; `accelerate config` writes them."""
PREFIXES: Final = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo"}
"""Sections of the file whose keys get a prefix unless they have it."""
_NO_SUCH_VALUE: Final = "grpo-run-asks-whether-this-is-read"
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Environment of the ranks, as accelerate computes it.

    Args:
        environment: environment of a rank, including the launcher's own.
        without_effect: keys of the file (`section.key`) that do not change that environment.
    """

    environment: Mapping[str, str]
    without_effect: tuple[str, ...]


def read(path: Path) -> Any:
    """Return accelerate's `ClusterConfig` of a file.

    Raises:
        ConfigError: there is no such file, or accelerate refuses it.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    if not path.is_file():
        raise ConfigError(f"{path}: no such accelerate configuration file (from {Path.cwd()})")
    return with_refusal(path, lambda: load_config_from_file(str(path)))


def compute(path: Path, *, num_processes: int, num_machines: int, has_accelerator: bool) -> RankEnvironment:
    """Compute the environment that the file results in.

    Args:
        path: the configuration file.
        num_processes: number of ranks on all machines.
        num_machines: number of nodes.
        has_accelerator: whether this node has a GPU.

    Raises:
        ConfigError: accelerate refuses the file; the message has accelerate's error.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    counts = ["--num_processes", num_processes, "--num_machines", num_machines]
    words = ["--config_file", path, *counts, "script.py"]
    arguments = launch_command_parser().parse_args([str(word) for word in words])

    def build() -> RankEnvironment:
        validated, defaults, from_file = _validate_launch_command(arguments)
        # the other arguments select addresses and ports, which torch elastic negotiates itself
        validated.num_machines = 1
        validated.main_process_port = 0
        prepare = _prepare_function(validated, defaults, from_file)
        environment = prepare(copy.copy(validated))
        sections = {name: value for name, value in vars(defaults).items() if isinstance(value, dict)}
        without_effect = [
            f"{section}.{key}"
            for section, values in sections.items()
            for key, value in values.items()
            if value is not None
            and key not in LAUNCHER_KEYS
            and not _is_read(_argument_of(section, key), validated, prepare, environment)
        ]
        return RankEnvironment(environment=environment, without_effect=tuple(without_effect))

    launch: RankEnvironment = with_refusal(path, build)
    environment = {
        name: value
        for name, value in launch.environment.items()
        if name not in SET_BY_ELASTIC and (name != AFFINITY_VARIABLE or os.environ.get(name) == value)
    }
    if has_accelerator:
        environment |= _without_peer_to_peer(environment)
    return RankEnvironment(environment=environment, without_effect=launch.without_effect)


def with_refusal(path: Path, ask: Callable[[], Any]) -> Any:
    """Call `ask` and convert an error of accelerate into a `ConfigError` of one line."""
    try:
        return ask()
    except (
        ValueError, RuntimeError, ImportError, TypeError, AttributeError, OSError, yaml.YAMLError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: accelerate refuses it: {reason[:MAX_REASON_CHARACTERS]}") from error


def check_deepspeed(path: Path, environment: Mapping[str, str]) -> None:
    """Let accelerate read the DeepSpeed settings as a rank would, before any rank starts.

    Raises:
        MissingPackageError: DeepSpeed is not installed.
        ConfigError: the settings contradict each other, or the DeepSpeed file is not valid.
    """
    check_extra(f"{path}: distributed_type DEEPSPEED", "deepspeed")
    from accelerate.utils import DeepSpeedPlugin, patch_environment

    names = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}

    def build() -> None:
        with patch_environment(**names):
            DeepSpeedPlugin()

    with_refusal(path, build)


def _argument_of(section: str, key: str) -> str:
    """Return the name of the launcher's argument that a key of a section sets."""
    prefix = PREFIXES.get(section, "")
    return key if key.startswith(prefix) else f"{prefix}_{key}"


def _prepare_function(
    validated: argparse.Namespace, defaults: Any, precision_from_file: bool
) -> Callable[[argparse.Namespace], dict[str, str]]:
    """Return the function that `accelerate.commands.launch.launch_command` would call."""
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    if validated.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        validated.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return lambda arguments: dict(prepare_deepspeed_cmd_env(arguments)[1])
    if validated.use_fsdp or validated.multi_gpu:
        return lambda arguments: dict(prepare_multi_gpu_env(arguments))
    return lambda arguments: dict(prepare_simple_launcher_cmd_env(arguments)[1])


def _is_read(
    key: str,
    validated: argparse.Namespace,
    prepare: Callable[[argparse.Namespace], dict[str, str]],
    environment: Mapping[str, str],
) -> bool:
    """Whether another value of this key would change the environment of the ranks: if not, it is not read."""
    changed = copy.copy(validated)
    setattr(changed, key, _NO_SUCH_VALUE)
    try:
        other = prepare(changed)
    except (ValueError, TypeError):  # it is read, and the test value is refused
        return True
    return any(other.get(name) != environment.get(name) for name in {*other, *environment} - {"MASTER_PORT"})


def _without_peer_to_peer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what accelerate's launchers add for GPUs whose driver does not support peer-to-peer access."""
    from accelerate.utils import check_cuda_p2p_ib_support

    if check_cuda_p2p_ib_support():
        return {}
    return {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in environment}
