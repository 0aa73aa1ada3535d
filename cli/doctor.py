"""`grpo-run doctor [DIR] [--json]`: examine this machine before a run.

Reads and prints; what is examined is in `runtime/preflight/`. Writes one file of at most 64 MiB into the
directory, and removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.planning.options import parse_size
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.preflight.checks import Finding, State, examine
from grpo_run.runtime.preflight.reading import WRITTEN_BYTES, read_facts
from grpo_run.runtime.upstream.features import FEATURES, is_released
from grpo_run.watchdog.text import counted

EXIT_FAILED = 1
"""A check has failed."""


def main(arguments: Sequence[str]) -> int:
    """Print one line for each check; returns 0, or 1 (`EXIT_FAILED`) if one has failed."""
    parser = CommandParser(
        prog="grpo-run doctor",
        description=(
            "Examine this machine before a run: libraries, GPUs, memory, disk, limits, clock, network, and"
            " what is left of earlier runs. A failure ends runs or keeps them from starting; a warning costs"
            " time or evidence. Writes one file of at most 64 MiB into the directory, and removes it."
        ),
    )
    parser.add_argument(
        "directory", nargs="?", default=".", help="where checkpoints will be (default: the working directory)"
    )
    parser.add_argument("--nproc-per-node", type=int, default=0, metavar="N", help="ranks on this machine")
    parser.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        help="of node 0, if it is to be a fixed one (several nodes)",
    )
    parser.add_argument("--checkpoint-size", metavar="SIZE", help="of one checkpoint, such as 3GiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 0:
        raise UsageError(f"--nproc-per-node {options.nproc_per_node}: must be 0 (unknown) or more")
    if options.master_port is not None and not 0 < options.master_port < 1 << 16:
        raise UsageError(f"--master-port {options.master_port}: must be a port from 1 to 65535")
    size = options.checkpoint_size
    checkpoint_bytes = 0 if size is None else parse_size("--checkpoint-size", size)
    try:
        facts = read_facts(
            Path(options.directory),
            os.environ,
            ranks=options.nproc_per_node,
            port=options.master_port,
            checkpoint_bytes=checkpoint_bytes,
            written_bytes=WRITTEN_BYTES,
        )
    except OSError as error:
        raise UsageError(f"{options.directory[:200]}: {error.strerror}; name another directory") from error
    findings = [*examine(facts), *(_features() if None not in facts.versions.values() else ())]
    number = {state: sum(one.state is state for one in findings) for state in State}
    if options.json:
        found = {"schema": 1, "failed": number[State.fail], "checks": [asdict(one) for one in findings]}
        print(json.dumps(found, indent=2))
    else:
        _print(findings)
        others = [f"{number[state]} {state.value}" for state in list(State)[1:]]
        print(f"{counted(len(findings), 'check')}: {number[State.ok]} ok, {', '.join(others)}")
    return EXIT_FAILED if number[State.fail] else 0


def _features() -> Iterator[Finding]:
    """What the installed releases lack."""
    off = [feature for feature in FEATURES if not is_released(feature)]
    for feature in off:
        text = f"off: {feature.text}, which needs {feature.since}"
        yield Finding(name="feature", state=State.not_applicable, text=text)
    if not off:
        yield Finding(name="features", state=State.ok, text=f"all {len(FEATURES)} have what they need")


def _print(findings: Sequence[Finding]) -> None:
    states = max(len(one.state.value) for one in findings)
    names = max(len(one.name) for one in findings)
    for one in findings:
        print(f"{one.state.value:{states}}  {one.name:{names}}  {one.text}")
        if one.fix:
            print(f"{'':{states + names + 4}}{one.fix}")
