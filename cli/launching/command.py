"""Parse and check the command line of `grpo-run launch`: the options, the script and the number of ranks.

Called by `cli/launch.py`. Every refusal is one line, before any process starts. Executes nothing of the
user's.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_run.cli.launching import _values as values
from grpo_run.cli.launching._torchrun import check_torchruns, handler_seconds, numa_cpus, shown_local_ranks
from grpo_run.cli.launching.identity import check_resume_from, locate
from grpo_run.cli.launching.notifications import address, without_path
from grpo_run.cli.launching.options import LaunchOptions, OptionWords, build_parser, values_of
from grpo_run.cli.launching.script_file import (
    check_configs,
    check_output_directory,
    check_source,
    check_yaml,
    source_of,
)
from grpo_run.dashboards.metrics.address import parse_address
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.launch.accelerate import Parallelism, load_parallelism
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.launch.option import given_values
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
class LaunchCommand:
    """A checked command line: torch elastic's arguments and the configuration of the run.

    `script` is the file that will run, `typed` the words as typed, `snapshot_folder` where the run's staging
    area is created; None to write checkpoints directly to disk.
    """

    elastic: argparse.Namespace = field(repr=False)
    config: RunConfig
    metrics_address: str
    script: Path
    on_end: str | None
    notify: str = field(repr=False)
    heartbeat_url: str = field(repr=False)
    typed: tuple[str, ...] = field(repr=False)
    accept_change: bool
    snapshot_folder: Path | None

    @property
    def recorded(self) -> list[str]:
        """The words for `run.json`; addresses of `--notify` and `--heartbeat-url` without what is secret."""
        own = len(self.typed) - len(self.config.arguments)
        return [*map(without_path, self.typed[:own]), *self.typed[own:]]


def parse(arguments: Sequence[str], *, starts_over: int = 0) -> LaunchCommand:
    """Check everything that can be checked before a process is started.

    Args:
        starts_over: above 0 for a new run that follows so many which could not be resumed.

    Raises:
        UsageError: something is wrong; the message is the one line the user sees.
    """
    parser = build_parser()
    command = OptionWords(parser).identity(arguments)
    options = parser.parse_args(arguments)
    given = values_of(options)
    launch = LaunchOptions(**given_values(LaunchOptions, given))
    for sentence in untested_versions():
        _warn(sentence)
    check_torchruns(options)
    if launch.on_end is not None and not launch.on_end.strip():
        raise UsageError("--on-end: give a command, or leave the option out")
    notify = address("--notify", launch.notify)
    heartbeat_url = address("--heartbeat-url", launch.heartbeat_url)
    if launch.metrics_addr != "off":
        parse_address(launch.metrics_addr)
    source = source_of(options.training_script, module=options.module)
    check_source(source)
    check_configs(options.training_script_args)
    if options.accelerate_config and Path(options.accelerate_config).is_file():
        check_yaml(Path(options.accelerate_config))
    core = given_values(RunConfig, given)
    features = {one.NAME: one(**given_values(one, given)) for one in feature_settings()}
    parse_signals(options.signals_to_handle)
    nodes = node_range(options)
    if nodes[1] == 1:  # of several, only the one with rank 0 writes
        for sentence in check_output_directory(options.training_script_args):
            _warn(sentence)
    if options.on_resume_failure == "fresh" and nodes[1] > 1:
        raise UsageError(
            "--on-resume-failure fresh: one node only, because several cannot agree on the new run"
        )
    ranks = parallelism(options, nodes[0])
    options.nproc_per_node = str(ranks.ranks_per_node)
    if ranks.replaced:
        _warn(ranks.replaced)
    for one in features.values():
        if hasattr(one, "check_ranks"):
            one.check_ranks(ranks.ranks_per_node * nodes[1])
    check_descriptors(ranks.ranks_per_node, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    shown = shown_local_ranks(options, ranks.ranks_per_node)
    token = secrets.token_hex(TOKEN_BYTES)
    location = locate(options, command, nodes[1], token, starts_over=starts_over > 0)
    series, run_id, directory = location
    check_resume_from(options.resume_from, directory, options.training_script_args)
    output = values.output()
    config = RunConfig(
        run_id=run_id,
        series=series,
        run_directory=directory.resolve(),
        target=options.training_script,
        module=bool(options.module),
        arguments=tuple(options.training_script_args),
        command=tuple(command),
        environment=dict(ranks.environment),
        budget=Budget()
        if options.max_restarts is None
        else Budget(failures_without_progress=options.max_restarts),
        timeouts=values.timeouts(given, handler_seconds(options)),
        deadlines=values.deadlines(given),
        starts_over=starts_over or location.starts_over,
        features={name: to_json(one) for name, one in features.items()},
        expected_distributed_type=ranks.expected_distributed_type,
        shown_ranks=values.shown_ranks(launch.show_ranks, output, ranks.ranks_per_node * nodes[1])
        if shown is None
        else frozenset(
            rank for rank in range(ranks.ranks_per_node * nodes[1]) if rank % ranks.ranks_per_node in shown
        ),
        output=output,
        rank_cpus=numa_cpus(options, ranks.ranks_per_node),
        **{**core, "fresh": core.get("fresh", False) or starts_over > 0},
    )
    return LaunchCommand(
        elastic=options,
        config=config,
        metrics_address=launch.metrics_addr,
        script=source,
        on_end=launch.on_end,
        notify=notify,
        heartbeat_url=heartbeat_url,
        typed=tuple(arguments),
        accept_change=launch.accept_change,
        snapshot_folder=values.snapshot_folder(launch.snapshot_dir, nodes[1]),
    )


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


def parallelism(options: argparse.Namespace, nodes: int) -> Parallelism:
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
        raise UsageError(
            f"--nproc-per-node {options.nproc_per_node}: {str(error).rstrip('.')}; give a number, cpu or auto"
        ) from None
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: must be at least 1")
    loaded = Parallelism(environment={}, ranks_per_node=processes)
    if options.accelerate_config:
        import torch

        loaded = load_parallelism(
            Path(options.accelerate_config),
            nproc_per_node=processes if given else None,
            nnodes=nodes,
            has_accelerator=torch.accelerator.is_available(),
        )
    environment = {**os.environ, **loaded.environment}
    if loaded.ranks_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return replace(loaded, environment=environment)
