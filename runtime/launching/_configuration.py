"""Check a request, and make the configuration of its run: the options, the script and the number of ranks.

Called by `launch.py`. Every refusal is one line, before any process starts. Executes nothing of the user's.
"""

from __future__ import annotations

import os
import resource
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.accelerate import Parallelism, load_parallelism
from grpo_run.runtime.launch.config import Budget, RunConfig, RunOptions
from grpo_run.runtime.launching import _values as values
from grpo_run.runtime.launching._identity import check_resume_from, identifying_words, locate
from grpo_run.runtime.launching.notifications import address, without_path
from grpo_run.runtime.launching.request import LaunchOptions, RunRequest
from grpo_run.runtime.launching.script_file import (
    check_configs,
    check_output_directory,
    check_source,
    check_yaml,
    source_of,
)
from grpo_run.runtime.launching.torchrun import (
    TorchrunOptions,
    check_torchruns,
    handler_seconds,
    numa_cpus,
    shown_local_ranks,
)
from grpo_run.runtime.processes.starting import parse_signals
from grpo_run.runtime.upstream.versions import untested_versions
from grpo_run.watchdog.json_values import to_json

TOKEN_BYTES = 4
"""Of the random part of a new run's id."""
DESCRIPTORS, DESCRIPTORS_PER_RANK = 128, 16
"""Open files of the supervisor: libraries, the run's files, connections to the metrics, which take a fourth
at most, and evidence of a fault. Of a rank: its pipe, sentinel and files, and a connection to the store for
each process group."""


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """A checked request: torch elastic's options, and the configuration of the run.

    `options` are those of the request, with addresses in place of the files that hold them. `script` is the
    file that will run, `recorded` the words of the command for `run.json`, without what is secret in
    addresses, and `snapshot_folder` where the run's staging area is created; None to write checkpoints
    directly to disk.
    """

    elastic: TorchrunOptions = field(repr=False)
    ranks_per_node: int
    options: LaunchOptions
    config: RunConfig
    script: Path
    recorded: list[str] | None
    snapshot_folder: Path | None


def configure(request: RunRequest) -> PreparedLaunch:
    """Check everything that can be checked before a process is started.

    Raises:
        UsageError: something is wrong; the message is the one line the user sees.
    """
    launch, elastic = request.launch, request.torchrun
    for sentence in untested_versions():
        _warn(sentence)
    check_torchruns(elastic)
    if launch.on_end is not None and not launch.on_end.strip():
        raise UsageError("--on-end: give a command, or leave the option out")
    launch = replace(
        launch,
        notify=address("--notify", launch.notify),
        heartbeat_url=address("--heartbeat-url", launch.heartbeat_url),
    )
    source = source_of(request.target, module=request.module)
    check_source(source)
    check_configs(request.arguments)
    if launch.accelerate_config and Path(launch.accelerate_config).is_file():
        check_yaml(Path(launch.accelerate_config))
    parse_signals(elastic.signals_to_handle)
    nodes = node_range(elastic)
    if nodes[1] == 1:  # of several, only the one with rank 0 writes
        for sentence in check_output_directory(request.arguments):
            _warn(sentence)
    ranks = parallelism(elastic, launch.accelerate_config, nodes[0])
    elastic = replace(elastic, nproc_per_node=str(ranks.ranks_per_node))
    if ranks.replaced:
        _warn(ranks.replaced)
    world_size = ranks.ranks_per_node * nodes[1]
    for one in request.features:
        if hasattr(one, "check_ranks"):
            one.check_ranks(world_size)
    check_descriptors(ranks.ranks_per_node, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    shown = shown_local_ranks(elastic, ranks.ranks_per_node, launch.show_ranks)
    command = identifying_words(request)
    location = locate(request, command, nodes[1], secrets.token_hex(TOKEN_BYTES))
    check_resume_from(request.options.resume_from, location.directory, request.arguments)
    config = RunConfig(
        **{one.name: getattr(request.options, one.name) for one in fields(RunOptions)},
        run_id=location.run_id,
        series=location.series,
        run_directory=location.directory.resolve(),
        target=request.target,
        module=request.module,
        arguments=request.arguments,
        command=tuple(command),
        environment=dict(ranks.environment),
        budget=Budget()
        if elastic.max_restarts is None
        else Budget(failures_without_progress=elastic.max_restarts),
        timeouts=values.timeouts(request.timeouts, handler_seconds(elastic)),
        deadlines=values.deadlines(request.deadlines),
        output_root=request.output_root,
        features={one.NAME: to_json(one) for one in request.features},
        expected_distributed_type=ranks.expected_distributed_type,
        shown_ranks=values.shown_ranks(launch.show_ranks, request.output, world_size)
        if shown is None
        else frozenset(rank for rank in range(world_size) if rank % ranks.ranks_per_node in shown),
        output=request.output,
        rank_cpus=numa_cpus(elastic, ranks.ranks_per_node),
    )
    return PreparedLaunch(
        elastic=elastic,
        ranks_per_node=ranks.ranks_per_node,
        options=launch,
        config=config,
        script=source,
        recorded=None if request.typed is None else _without_secrets(request.typed, request.arguments),
        snapshot_folder=values.snapshot_folder(launch.snapshot_dir),
    )


def _without_secrets(typed: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the words of a command; those before the script's arguments without what is secret."""
    own = len(typed) - len(arguments)
    return [*map(without_path, typed[:own]), *typed[own:]]


def check_descriptors(ranks: int, limit: int) -> None:
    """Check that the limit of open files suffices for the supervisor of so many ranks.

    Raises:
        UsageError: it does not; without descriptors a fault could not be handled.
    """
    needed = DESCRIPTORS + DESCRIPTORS_PER_RANK * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"the limit of open files is {limit}, and {ranks} rank(s) need {needed}: raise it with `ulimit"
            f" -n {needed}`"
        )


def _warn(text: str) -> None:
    print(f"grpo-run: {text}", file=sys.stderr)


def node_range(options: TorchrunOptions) -> tuple[int, int]:
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


def parallelism(options: TorchrunOptions, accelerate_config: str | None, nodes: int) -> Parallelism:
    """Return the ranks of this node, from `--nproc-per-node` and `--accelerate-config`.

    Args:
        nodes: the smallest number of nodes.

    Raises:
        UsageError: the number of processes or the configuration file is wrong.
    """
    from torch.distributed.run import determine_local_world_size

    given = options.nproc_per_node is not None
    try:
        processes = determine_local_world_size(
            "1" if options.nproc_per_node is None else options.nproc_per_node
        )
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {options.nproc_per_node}: {str(error).rstrip('.')}; give a number, cpu or auto"
        ) from None
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: must be at least 1")
    loaded = Parallelism(environment={}, ranks_per_node=processes)
    if accelerate_config:
        import torch

        loaded = load_parallelism(
            Path(accelerate_config),
            nproc_per_node=processes if given else None,
            nnodes=nodes,
            has_accelerator=torch.accelerator.is_available(),
        )
    environment = {**os.environ, **loaded.environment}
    if loaded.ranks_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return replace(loaded, environment=environment)
