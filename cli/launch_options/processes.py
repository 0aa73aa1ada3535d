"""How many nodes and ranks a run has, and the environment of the ranks. Called by `parse.py` and `cli/launch.py`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks of one node.

    Args:
        per_node: how many.
        environment: their environment variables, without those that torch elastic sets.
        expected_distributed_type: accelerate's `DistributedType` that must result; None to accept any.
        replaced: what the command line replaces of the accelerate configuration, as a sentence; "" for nothing.
    """

    per_node: int
    environment: dict[str, str]
    expected_distributed_type: str | None
    replaced: str


def node_range(options: argparse.Namespace) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes.

    Raises:
        UsageError: `--nnodes` is not N or MIN:MAX.
    """
    from torch.distributed.run import parse_min_max_nnodes

    try:
        low, high = parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes {options.nnodes}: write N or MIN:MAX") from None
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {options.nnodes}: needs 0 < MIN <= MAX")
    return int(low), int(high)


def parallelism(options: argparse.Namespace, nodes: int) -> Ranks:
    """Return the ranks of this node, from `--nproc-per-node` and `--accelerate-config`.

    Args:
        options: the parsed command line.
        nodes: the smallest number of nodes.

    Raises:
        UsageError: the number of processes or the configuration file is wrong.
    """
    from torch.distributed.run import determine_local_world_size

    given = options.nproc_per_node is not None
    try:
        processes = determine_local_world_size(options.nproc_per_node if given else "1")
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {options.nproc_per_node}: {error}") from None
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: must be at least 1")
    environment, expected, replaced = dict(os.environ), None, ""
    if options.accelerate_config:
        import torch

        from grpo_run.runtime.launch.accelerate import load_parallelism

        loaded = load_parallelism(
            Path(options.accelerate_config),
            nproc_per_node=processes if given else None,
            nnodes=nodes,
            has_accelerator=torch.accelerator.is_available(),
            allow_ineffective=options.allow_untested,
        )
        environment.update(loaded.environment)
        expected, processes = loaded.expected_distributed_type, loaded.ranks_per_node
        replaced = loaded.replaced
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return Ranks(
        per_node=processes, environment=environment, expected_distributed_type=expected, replaced=replaced
    )
