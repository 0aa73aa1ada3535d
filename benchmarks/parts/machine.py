"""The machine a result was measured on: processor, memory, load, versions and commit. Part of every result.

Each benchmark calls `facts` before it starts anything, so that the load average excludes the benchmark
itself. Also holds the options that all benchmarks share. Does not measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("grpo-run", "torch", "transformers", "trl", "accelerate")


def facts() -> dict[str, Any]:
    """Return the current properties of the machine and the installed versions."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_files": len((_git("status", "--porcelain") or "").splitlines()),
    }


def sentence(machine: dict[str, Any]) -> str:
    """Return the facts in one line, to print below a table."""
    versions = " ".join(f"{name} {number}" for name, number in machine["versions"].items())
    load = machine["load_average_before"][0]
    return (
        f"{machine['cores']} cores, {machine['processor']}, load before {load}, python {machine['python']},"
        f" {versions}, commit {machine['commit']}"
        + (f" with {machine['uncommitted_files']} changed files" if machine["uncommitted_files"] else "")
    )


def finish(console: Console, result: dict[str, Any], path: Path | None) -> None:
    """Print the machine's facts, and write the result to the path given by `--json`."""
    machine = result["machine"]
    console.print(sentence(machine), style="dim", highlight=False)
    if machine["load_average_before"][0] > 0.2 * machine["cores"]:
        console.print("[yellow]The machine was not idle before the start: the figures are not valid.[/]")
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples and the machine's facts to FILE"
    )
    return parser


def count(text: str) -> int:
    """Parse an argument that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
