"""What may be written after `grpo-run launch`: torchrun's flags, ours, the script and its arguments.

Everything that can be checked before a process is started is checked here, and each refusal is one line.
Used by `launch.py`, and by `train.py` for a run's identity. Starts nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grpo_run.dashboards.metrics.address import parse_address
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.config import Budget, RunConfig, Timeouts
from grpo_run.runtime.launch.injection import GRAMMAR, help_text, parse_all
from grpo_run.runtime.launch.injection import check as check_injections
from grpo_run.runtime.launch.script import needs_fresh_interpreter, source_of
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import DEFAULT_ROOT, RunDirectory, default_run_id
from grpo_run.runtime.staging.slots import MEMORY_ROOT, place
from grpo_run.trainers.hooks import caps
from grpo_run.trainers.upstream import check_versions
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

NODE_FLAGS = frozenset(
    [
        "--node-rank",
        "--node_rank",
        "--local-addr",
        "--local_addr",
        "--run-dir",
        "--metrics-addr",
        "--show-ranks",
        "--fresh",
        "--snapshot-dir",
    ]
)
"""Flags that differ between the nodes of one run, or say only where to look at it: no part of its identity."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A checked command line: torch elastic's arguments and our configuration."""

    elastic: argparse.Namespace
    config: RunConfig
    metrics_address: str


class _Inject(argparse.Action):
    """Collects injections; `--inject help` lists their kinds and leaves, as `--help` does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if values == "help":
            print(help_text())
            parser.exit()
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])


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
    # None tells "not said" from torchrun's own default; its variables (PET_*) still say it
    for name in ("max_restarts", "nproc_per_node"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
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
    group.add_argument("--snapshot-every", default="auto", metavar="STEPS|auto", help="copy everything needed to go on into memory; 0 for never; auto, the default, weighs what one costs against what a fault would")  # fmt: skip
    group.add_argument("--snapshot-dir", default=str(MEMORY_ROOT), metavar="DIR|off", help=f"a file system in memory for checkpoints on their way to disk; 'off' makes training wait for the disk; default {MEMORY_ROOT}")  # fmt: skip
    group.add_argument("--generation", action="append", default=[], metavar="KEY=VALUE", help=f"cap generation: {', '.join(caps.KEYS)}; repeat the flag, or end the list with --")  # fmt: skip
    group.add_argument("--inject", action=_Inject, default=[], metavar=GRAMMAR.partition("[")[0], help=f"a drill: hurt one rank once, as kill@rank1:step7; {GRAMMAR}; repeat the flag; '--inject help' lists the kinds")  # fmt: skip
    group.add_argument("--metrics-addr", default="127.0.0.1:9460", metavar="HOST:PORT", help="Prometheus; the next free port when taken; 'off' for none")  # fmt: skip
    for word, meaning in (
        ("floor", "no silence shorter than this is called a hang; default 8"),
        ("ceiling", "the most that is granted to what the run has not shown; default 3600"),
        ("first", "for the first occurrence of a phase; default 1800"),
        (
            "exit",
            "after the last line, for a process that does nothing; default 8, 300 while it is connected",
        ),
    ):
        group.add_argument(f"--deadline-{word}", type=float, metavar="SECONDS", help=meaning)
    group.add_argument(
        "--stop-timeout", type=float, default=300.0, metavar="SECONDS", help="after a stop was asked for"
    )
    group.add_argument(
        "--vote-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="time limit of a vote among the ranks; default 1800",
    )
    group.add_argument(
        "--show-ranks", default="0", metavar="RANKS", help="whose output is shown: 0,1,… or all; default 0"
    )
    return parser


def parse(arguments: Sequence[str]) -> Launch:
    """Check everything that can be checked before a process is started.

    Raises:
        UsageError: something is wrong; the message is the one line the user sees.
    """
    parser = build_parser()
    options = parser.parse_args(_split_generation(arguments, _switches(parser)))
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
    if options.metrics_addr != "off":
        parse_address(options.metrics_addr)
    source = source_of(options.training_script, module=options.module)
    generation = caps.parse(options.generation)
    injections = parse_all(options.inject)
    nodes = node_range(options)
    environment, expected, processes = _parallelism(options, nodes[0])
    options.nproc_per_node = str(processes)
    check_injections(injections, processes * nodes[1])
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
        run_directory=path.resolve(),
        target=options.training_script,
        module=bool(options.module),
        arguments=tuple(options.training_script_args),
        command=tuple(command),
        environment=environment,
        preload=not options.no_preload and not setters,
        budget=Budget()
        if options.max_restarts is None
        else Budget(failures_without_progress=options.max_restarts),
        timeouts=Timeouts(stop_seconds=options.stop_timeout, vote_seconds=options.vote_timeout),
        deadlines=_deadlines(options),
        injections=injections,
        hygiene_every=options.hygiene_every,
        snapshot_every=_snapshot_every(options.snapshot_every),
        snapshot_directory=_snapshot_directory(options.snapshot_dir, path, run_id, nodes[1]),
        generation=generation,
        resume_from=options.resume_from,
        allow_untested=options.allow_untested,
        expected_distributed_type=expected,
        shown_ranks=_shown(options.show_ranks, processes * nodes[1]),
    )
    return Launch(elastic=options, config=config, metrics_address=options.metrics_addr)


def _snapshot_every(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--snapshot-every {text}: a number of steps, 0 for never, or auto")
    return int(text)


def _snapshot_directory(text: str, run_directory: Path, run_id: str, nodes: int) -> Path | None:
    """Where snapshots go; None when checkpoints are to be written directly, by wish or because they must."""
    if text == "off" or nodes > 1:
        return None  # of several nodes each would have a part of a checkpoint, and nobody the whole
    root = Path(text).absolute()
    if not root.is_dir():
        if text == str(MEMORY_ROOT):
            return None  # no such file system here
        raise UsageError(
            f"--snapshot-dir {text}: not a directory; name one on a file system in memory, or off"
        )
    found = place(run_directory, run_id, root)
    if found is None and text != str(MEMORY_ROOT):
        raise UsageError(
            f"--snapshot-dir {text}: cannot be written, or grpo-run-{os.getuid()} in it is not yours alone"
        )
    return found


def _deadlines(options: argparse.Namespace) -> DeadlineSettings:
    """Bounds of the learned deadlines; what was not said keeps its default."""
    names = {
        "floor": "floor_seconds", "ceiling": "ceiling_seconds", "first": "first_seconds", "exit": "exit_seconds",
    }  # fmt: skip
    said = {
        field: value
        for word, field in names.items()
        if (value := getattr(options, f"deadline_{word}")) is not None
    }
    try:
        return DeadlineSettings(**said)
    except ValueError as error:
        raise UsageError(
            f"--deadline-{'/--deadline-'.join(w for w in names if getattr(options, f'deadline_{w}') is not None)}: {error}"
        ) from None


def _split_generation(arguments: Sequence[str], switches: frozenset[str]) -> list[str]:
    """Let `--generation a=1 b=2 script.py` end its list at the first word that is no KEY=VALUE.

    Args:
        switches: flags that take no value; the first word that is neither a flag nor a flag's value is the
            script, and what follows it is not ours.
    """
    out: list[str] = []
    words = list(arguments)
    while words and words[0] != "--" and words[0].startswith("-"):
        word = words.pop(0)
        if word != "--generation":
            out += [word, *_value(word, words, switches)]
            continue
        if not words or "=" not in words[0] or words[0].startswith("-"):
            raise UsageError("--generation: write KEY=VALUE after it")
        while words and "=" in words[0] and not words[0].startswith("-"):
            out.append(f"--generation={words.pop(0)}")
    return out + words


def _value(flag: str, words: list[str], switches: frozenset[str]) -> list[str]:
    """Take the flag's value off the words that follow it, unless it has none or carries it (`--a=1`, `-r3`)."""
    alone = flag not in switches and "=" not in flag and (flag.startswith("--") or len(flag) == 2)
    return [words.pop(0)] if alone and words else []


def _switches(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(
        name for action in parser._actions if action.nargs == 0 for name in action.option_strings
    )


def identity(arguments: Sequence[str]) -> list[str]:
    """The words of a command that make it this run: without what differs by node or only looks."""
    switches = _switches(build_parser())
    words = _split_generation(arguments, switches)
    kept: list[str] = []
    while words and words[0] != "--" and words[0].startswith("-"):
        word = words.pop(0)
        value = _value(word, words, switches)
        if word.partition("=")[0] not in NODE_FLAGS:
            kept += [word, *value]
    return kept + words  # from the script on, every word is the script's


def node_range(options: argparse.Namespace) -> tuple[int, int]:
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

    given = options.nproc_per_node is not None
    try:
        processes = determine_local_world_size(options.nproc_per_node if given else "1")
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {options.nproc_per_node}: {error}") from None
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: needs at least 1")
    environment, expected = dict(os.environ), None
    if options.accelerate_config:
        import torch

        from grpo_run.runtime.launch.accelerate import load_parallelism

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
        path = Path(options.run_dir)
        if options.fresh and History.of(read_journal(RunDirectory(path=path).journal)).finished:
            raise UsageError(f"--fresh: the run in --run-dir {path} has finished; name another directory")
        return base, path
    suffix = "" if nodes == 1 else f"-{os.uname().nodename}"
    run_id, number = base, 1
    while (other := RunDirectory(path=DEFAULT_ROOT / f"{base}-{number + 1}{suffix}")).run_json.is_file():
        number += 1
        if other.read_run().get("command") == list(command):  # else somebody's own `--run-id`
            run_id = f"{base}-{number}"
    path = DEFAULT_ROOT / f"{run_id}{suffix}"
    if options.fresh and History.of(read_journal(RunDirectory(path=path).journal)).finished:
        run_id = f"{base}-{number + 1}"
        path = DEFAULT_ROOT / f"{run_id}{suffix}"
    return run_id, path
