"""`grpo-run launch [torchrun's flags] [our flags] script.py [arguments]`: run a training script under supervision."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grpo_run.runtime import forkserver
from grpo_run.runtime.config import RunConfig, Timeouts
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, ProcessError, UsageError
from grpo_run.runtime.history import History
from grpo_run.runtime.journal import read_journal
from grpo_run.runtime.policy import Budget
from grpo_run.runtime.rundir import DEFAULT_ROOT, RunDirectory, default_run_id
from grpo_run.runtime.script import needs_fresh_interpreter, source_of
from grpo_run.runtime.supervisor import Supervisor
from grpo_run.trainers import caps
from grpo_run.trainers.settings import RankSettings
from grpo_run.trainers.upstream import check_versions

ENTRY = "grpo_run.trainers.bootstrap:main"
PRELOAD = ("grpo_run.trainers.preload",)
NODE_FLAGS = frozenset(
    {"--node-rank", "--node_rank", "--local-addr", "--local_addr", "--run-dir", "--metrics-addr"}
)
"""Flags that differ between the nodes of one run, or say only where to look at it: no part of its identity."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A checked command line: torch elastic's arguments and our configuration."""

    elastic: argparse.Namespace
    config: RunConfig
    metrics_address: str


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see grpo-run launch --help)")


def build_parser() -> argparse.ArgumentParser:
    """Torchrun's own parser with our flags added."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Parser
    parser.prog = "grpo-run launch"
    parser.description = __doc__
    parser.set_defaults(max_restarts=None)
    group = parser.add_argument_group("grpo-run")
    group.add_argument(
        "--accelerate-config", metavar="FILE", help="what `accelerate launch --config_file FILE` would set"
    )
    group.add_argument(
        "--run-dir", metavar="DIR", help="where journal, logs and incidents go; default runs/RUN_ID"
    )
    group.add_argument(
        "--run-id", metavar="ID", help="default: the script's name and a digest of the command"
    )
    group.add_argument(
        "--fresh", action="store_true", help="when the run has finished, start another beside it"
    )
    group.add_argument(
        "--resume-from", metavar="RUN_ID|DIR", help="start from another run's checkpoints, or from one"
    )
    group.add_argument(
        "--no-preload", action="store_true", help="fresh interpreters instead of forked warm ones"
    )
    group.add_argument(
        "--allow-untested", action="store_true", help="go on with library versions this was not tested with"
    )
    group.add_argument("--hygiene-every", type=int, default=100, metavar="STEPS", help="clean garbage and caches on the same step everywhere; 0 for never; default 100")  # fmt: skip
    group.add_argument("--generation", action="append", nargs="+", default=[], metavar="KEY=VALUE", help=f"cap generation: {', '.join(caps.KEYS)}; repeat the flag, or end the list with --")  # fmt: skip
    group.add_argument("--metrics-addr", default="127.0.0.1:9460", metavar="HOST:PORT", help="Prometheus; the next free port when taken; 'off' for none")  # fmt: skip
    group.add_argument(
        "--stop-timeout", type=float, default=300.0, metavar="SECONDS", help="after a stop was asked for"
    )
    group.add_argument(
        "--show-ranks", default="0", metavar="RANKS", help="whose output is shown: 0,1,… or all; default 0"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    launch = parse(arguments)
    return run(launch)


def parse(arguments: Sequence[str]) -> Launch:
    """Check everything that can be checked before a process is started.

    Raises:
        UsageError: something is wrong; the message is the one line the user sees.
    """
    parser = build_parser()
    options = parser.parse_args(_split_generation(list(arguments)))
    strange = check_versions(allow_untested=options.allow_untested)
    for sentence in strange:
        print(f"grpo-run: {sentence}; going on as asked", file=sys.stderr)
    for flag in ("no_python", "run_path"):
        if getattr(options, flag):
            raise UsageError(
                f"--{flag.replace('_', '-')} is not supported: ranks must be Python to be guarded"
            )
    for flag, default in (("log_dir", None), ("redirects", "0"), ("tee", "0"), ("start_method", "spawn")):
        if getattr(options, flag) != default:
            print(
                f"grpo-run: --{flag.replace('_', '-')} is ignored: each rank's output is in its own file",
                file=sys.stderr,
            )
    source = source_of(options.training_script, module=options.module)
    generation = caps.parse([item for group in options.generation for item in group])
    nodes = _nodes(options)
    environment, expected, processes = _parallelism(options, nodes[0])
    options.nproc_per_node = str(processes)
    setters = needs_fresh_interpreter(source)
    if setters and not options.no_preload:
        print(
            f"grpo-run: {source.name} sets {', '.join(sorted(setters))}: ranks are fresh interpreters",
            file=sys.stderr,
        )
    command = identity(arguments)
    run_id, path = _locate(options, command, nodes[1])
    config = RunConfig(
        run_id=run_id,
        run_directory=path,
        target=options.training_script,
        module=bool(options.module),
        arguments=tuple(options.training_script_args),
        command=tuple(command),
        environment=environment,
        preload=not options.no_preload and not setters,
        budget=Budget()
        if options.max_restarts is None
        else Budget(failures_without_progress=options.max_restarts),
        timeouts=Timeouts(stop_seconds=options.stop_timeout),
        hygiene_every=options.hygiene_every,
        generation=generation,
        resume_from=options.resume_from,
        allow_untested=options.allow_untested,
        expected_distributed_type=expected,
        shown_ranks=_shown(options.show_ranks, processes * nodes[1]),
    )
    return Launch(elastic=options, config=config, metrics_address=options.metrics_addr)


def _split_generation(arguments: list[str]) -> list[str]:
    """Let `--generation a=1 b=2 script.py` end its list at the first word that is no KEY=VALUE."""
    out: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        out.append(word)
        index += 1
        if word == "--generation":
            values = []
            while index < len(arguments) and "=" in arguments[index] and not arguments[index].startswith("-"):
                values.append(arguments[index])
                index += 1
            out.pop()
            for value in values or [""]:
                out.append(f"--generation={value}")
        elif not word.startswith("-") and (len(out) < 2 or not _takes_value(out[-2])):
            return out + arguments[index:]
    return out


def _takes_value(word: str) -> bool:
    return (word.startswith("--") and "=" not in word and word not in (
        "--standalone", "--module", "--no-python", "--no_python", "--run-path", "--run_path", "--fresh",
        "--no-preload", "--allow-untested", "--virtual-local-rank", "--virtual_local_rank",
    )) or word in ("-r", "-t")  # fmt: skip


def identity(arguments: Sequence[str]) -> list[str]:
    """The words of a command that make it this run: without what differs by node or only looks."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word in NODE_FLAGS:
            skip = True
        elif word != "--fresh" and word.partition("=")[0] not in NODE_FLAGS:
            kept.append(word)
    return kept


def _nodes(options: argparse.Namespace) -> tuple[int, int]:
    """The fewest and the most nodes."""
    from torch.distributed.run import parse_min_max_nnodes

    try:
        low, high = parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes {options.nnodes}: write N or MIN:MAX") from None
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {options.nnodes}: needs 0 < MIN <= MAX")
    return int(low), int(high)


def _parallelism(options: argparse.Namespace, nodes: int) -> tuple[dict[str, str], str | None, int]:
    """Environment for the ranks, the distributed type that must come of it, and ranks a node."""
    from torch.distributed.run import determine_local_world_size

    given = (
        any(word.startswith(("--nproc-per-node", "--nproc_per_node")) for word in sys.argv)
        or options.nproc_per_node != "1"
    )
    try:
        processes = determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {options.nproc_per_node}: {error}") from None
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: needs at least 1")
    environment, expected = dict(os.environ), None
    if options.accelerate_config:
        import torch

        from grpo_run.runtime.parallelism import load_parallelism

        parallelism = load_parallelism(
            Path(options.accelerate_config),
            nproc_per_node=processes if given else None,
            nnodes=nodes,
            has_accelerator=torch.accelerator.is_available(),
            allow_ineffective=options.allow_untested,
        )
        environment.update(parallelism.environment)
        expected, processes = parallelism.expected_distributed_type, parallelism.ranks_per_node
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment, expected, processes


def _shown(text: str, world_size: int) -> frozenset[int]:
    if text == "all":
        return frozenset(range(world_size))
    try:
        return frozenset(int(word) for word in text.split(",") if word)
    except ValueError:
        raise UsageError(f"--show-ranks {text}: write numbers with commas, or all") from None


def _locate(options: argparse.Namespace, command: Sequence[str], nodes: int) -> tuple[str, Path]:
    """The run's id and directory; with `--fresh`, the next of its series when the last has finished."""
    base = options.run_id or default_run_id(options.training_script, command)
    if "/" in base or base in ("", ".", ".."):
        raise UsageError(f"--run-id {base!r}: a name without slashes")
    if options.run_dir:
        return base, Path(options.run_dir)
    suffix = "" if nodes == 1 else f"-{os.uname().nodename}"
    run_id, number = base, 1
    while (DEFAULT_ROOT / f"{base}-{number + 1}{suffix}" / "run.json").is_file():
        number += 1
        run_id = f"{base}-{number}"
    path = DEFAULT_ROOT / f"{run_id}{suffix}"
    if options.fresh and History.of(read_journal(RunDirectory(path=path).journal)).finished:
        run_id = f"{base}-{number + 1}"
        path = DEFAULT_ROOT / f"{run_id}{suffix}"
    return run_id, path


def run(launch: Launch) -> int:
    """Supervise one run from here to its end."""
    config = launch.config
    directory = RunDirectory(path=config.run_directory.resolve())
    directory.create()
    lock = directory.acquire()
    try:
        if History.of(read_journal(directory.journal)).finished:
            print(f"grpo-run: run {config.run_id} has finished; nothing to do. Start another with --fresh.")
            return EXIT_FINISHED
        return _supervise(launch, directory)
    finally:
        os.close(lock)


def _supervise(launch: Launch, directory: RunDirectory) -> int:
    config = launch.config
    os.environ.update(config.environment)
    if config.preload:
        forkserver.start_server(PRELOAD)
    from grpo_run.dashboards.terminal import Terminal, progress_line
    from grpo_run.runtime.output import OutputFollower

    supervisor: Supervisor | None = None
    terminal = Terminal(
        shown=config.shown_ranks, progress=lambda: progress_line(supervisor.history) if supervisor else ""
    )
    output = OutputFollower(terminal.rank_line)
    if not directory.run_json.exists():
        directory.write_run(config.as_json())
    supervisor = Supervisor(
        config,
        directory,
        local_world_size=int(launch.elastic.nproc_per_node),
        rank_environment=_rank_environment,
        say=terminal.say,
        attempt_output=output.follow,
    )
    agent = _build_agent(launch, supervisor)
    server = None
    if launch.metrics_address != "off":
        from grpo_run.dashboards.server import start

        server = start(supervisor.status, launch.metrics_address)
        host, port = server.address
        terminal.say(f"run {config.run_id} in {directory.path}, metrics on http://{host}:{port}/metrics")
    else:
        terminal.say(f"run {config.run_id} in {directory.path}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: supervisor.request_stop(signal.Signals(received).name))
    terminal.start()
    output.start()
    try:
        supervisor.begin(world_size_local=int(launch.elastic.nproc_per_node))
        agent.run()
    except ProcessError as error:
        terminal.say(str(error))
        supervisor.exit_code = EXIT_GAVE_UP
    finally:
        output.stop()
        terminal.stop()
        if server is not None:
            server.stop(2.0)
    terminal.say(supervisor.sentence)
    assert supervisor.exit_code is not None
    return supervisor.exit_code


def _rank_environment(supervisor: Supervisor, rank: int, world_size: int) -> dict[str, str]:
    """What our bootstrap needs to know in one rank."""
    config = supervisor.config
    settings = RankSettings(
        run_id=config.run_id,
        run_directory=str(supervisor.run.path),
        target=config.target,
        module=config.module,
        arguments=config.arguments,
        attempt=supervisor.attempt,
        first_attempt=supervisor.attempt == 0,
        run_started_at=supervisor.run_started_at,
        log=str(supervisor.log_path(rank)),
        stacks=str(supervisor.stack_path(rank)),
        error=str(supervisor.error_path(rank)),
        preloaded=config.preload,
        title=f"grpo-run rank {rank}/{world_size}: {config.target} {' '.join(config.arguments)}".rstrip(),
        hygiene_every=config.hygiene_every,
        generation=config.generation,
        resume_from=config.resume_from,
        allow_untested=config.allow_untested,
        expected_distributed_type=config.expected_distributed_type,
        vote_timeout_seconds=config.timeouts.vote_seconds,
    )
    return settings.to_environment()


def _build_agent(launch: Launch, supervisor: Supervisor) -> Any:
    """Torch elastic's rendezvous from torchrun's flags, and our agent on it."""
    import uuid

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
    from torch.distributed.run import config_from_args

    from grpo_run.runtime.agent import Agent

    options = launch.elastic
    alone = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (alone and _nodes(options)[1] == 1):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = (
            "c10d",
            "localhost:0",
            str(uuid.uuid4()),
        )
    if options.master_port is None:
        options.master_port = 29500
    restarts, options.max_restarts = options.max_restarts, options.max_restarts or 0
    try:
        elastic, _, _ = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    handler = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=elastic.rdzv_backend,
            endpoint=elastic.rdzv_endpoint,
            run_id=elastic.run_id,
            min_nodes=elastic.min_nodes,
            max_nodes=elastic.max_nodes,
            local_addr=elastic.local_addr,
            **elastic.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role=elastic.role,
        local_world_size=elastic.nproc_per_node,
        entrypoint=launch.config.target,
        args=(),
        rdzv_handler=handler,
        max_restarts=restarts if restarts is not None else launch.config.budget.failures_without_progress,
        monitor_interval=elastic.monitor_interval,
        local_addr=elastic.local_addr,
        virtual_local_rank=elastic.virtual_local_rank,
    )
    return Agent(
        spec,
        conductor=supervisor,
        entry=ENTRY,
        environment={**launch.config.environment, "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle},
        preloaded=launch.config.preload,
        elastic=elastic.max_nodes > 1,
    )
