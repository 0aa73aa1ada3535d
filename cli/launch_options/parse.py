"""Parse and check the command line of `grpo-run launch`.

Called by `cli/launch.py`. Every refusal is one line, before any process starts.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.cli.launch_options import values
from grpo_run.cli.launch_options.flags import build_parser
from grpo_run.cli.launch_options.location import locate
from grpo_run.cli.launch_options.processes import node_range, parallelism
from grpo_run.cli.launch_options.resume_from import check_resume_from
from grpo_run.cli.launch_options.values import parse_memory_plan
from grpo_run.cli.launch_options.words import OptionWords
from grpo_run.dashboards.metrics.address import parse_address
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.launch.guard_options import parse_guards
from grpo_run.runtime.launch.injections import check as check_injections
from grpo_run.runtime.launch.injections import parse_all
from grpo_run.runtime.launch.resolution import reason_for_fresh_interpreters
from grpo_run.runtime.launch.script import source_of
from grpo_run.runtime.launch.sources import ScriptSource, local_modules
from grpo_run.runtime.processes.starting import parse_signals
from grpo_run.runtime.rank.rollouts import caps_settings as caps
from grpo_run.runtime.upstream.versions import check_versions

REFUSED = ("no_python", "run_path")
IGNORED = {"log_dir": None, "redirects": "0", "tee": "0", "start_method": "spawn"}
"""torchrun's options without effect here, and their defaults."""
TOKEN_BYTES = 4
"""Of the random part of a new run's id."""


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A checked command line: torch elastic's arguments and the configuration of the run.

    `sources` are the file that will run and its local modules, `typed` the words as typed, `snapshot_folder` where
    the run's staging area is created; None to write checkpoints directly to disk.
    """

    elastic: argparse.Namespace
    config: RunConfig
    metrics_address: str
    sources: tuple[ScriptSource, ...]
    on_end: str | None
    typed: tuple[str, ...]
    accept_change: bool
    snapshot_folder: Path | None


def parse(arguments: Sequence[str], *, starts_over: int = 0) -> LaunchCommand:
    """Check everything that can be checked before a process is started.

    Args:
        starts_over: above 0 for a new run that follows so many which could not be resumed.

    Raises:
        UsageError: something is wrong; the message is the one line the user sees.
    """
    parser = build_parser()
    words = OptionWords(parser)
    options = parser.parse_args(words.split_generation(arguments))
    for sentence in check_versions(allow_untested=options.allow_untested):
        _warn(f"{sentence}; accepted because of --allow-untested")
    _check_torchrun_options(options)
    if options.on_end is not None and not options.on_end.strip():
        raise UsageError("--on-end: give a command, or leave the option out")
    if options.metrics_addr != "off":
        parse_address(options.metrics_addr)
    source = source_of(options.training_script, module=options.module)
    generation = caps.parse(options.generation)
    memory_plan = parse_memory_plan(options.memory_plan)
    guards = parse_guards(options.guard)
    injections = parse_all(options.inject)
    parse_signals(options.signals_to_handle)
    nodes = node_range(options)
    if options.on_resume_failure == "fresh" and nodes[1] > 1:
        raise UsageError(
            "--on-resume-failure fresh: one node only, because several cannot agree on the new run"
        )
    ranks = parallelism(options, nodes[0])
    options.nproc_per_node = str(ranks.per_node)
    if ranks.replaced:
        _warn(ranks.replaced)
    check_injections(injections, ranks.per_node * nodes[1])
    first_entry = Path.cwd() if options.module else source.resolve().parent
    sources = tuple(local_modules(source, first_entry))
    reason = None if options.no_preload else reason_for_fresh_interpreters(sources, first_entry)
    if reason is not None:
        _warn(f"{reason}: ranks start as fresh interpreters")
    command = words.identity(arguments)
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
        environment=ranks.environment,
        preload=not options.no_preload and reason is None,
        budget=Budget()
        if options.max_restarts is None
        else Budget(failures_without_progress=options.max_restarts),
        timeouts=values.timeouts(options),
        deadlines=values.deadlines(options),
        injections=injections,
        strict_drills=options.strict_drills,
        hygiene_every=options.hygiene_every,
        memory_forecast=not options.no_memory_forecast,
        snapshot_every=values.snapshot_every(options.snapshot_every),
        generation=generation,
        memory_trace=options.memory_trace,
        memory_plan=memory_plan,
        reward_workers=options.reward_workers,
        reward_timeout_seconds=options.reward_timeout,
        exclusion=values.exclusion(options),
        guards=guards,
        resume_from=options.resume_from,
        fresh=options.fresh or starts_over > 0,
        on_resume_failure=options.on_resume_failure,
        starts_over=starts_over or location.starts_over,
        require_resume=options.require_resume,
        allow_degrade=options.allow_degrade,
        allow_untested=options.allow_untested,
        expected_distributed_type=ranks.expected_distributed_type,
        keep=tuple(options.keep),
        shown_ranks=values.shown_ranks(options.show_ranks, output, ranks.per_node * nodes[1]),
        output=output,
    )
    return LaunchCommand(
        elastic=options,
        config=config,
        metrics_address=options.metrics_addr,
        sources=sources,
        on_end=options.on_end,
        typed=tuple(arguments),
        accept_change=options.accept_change,
        snapshot_folder=values.snapshot_folder(options.snapshot_dir, nodes[1]),
    )


def _check_torchrun_options(options: argparse.Namespace) -> None:
    for name in REFUSED:
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is not supported: a rank must be a Python script or module"
            )
    for name, default in IGNORED.items():
        if getattr(options, name) != default:
            _warn(f"--{name.replace('_', '-')} is ignored: each rank's output is in its own file")


def _warn(text: str) -> None:
    print(f"grpo-run: {text}", file=sys.stderr)
