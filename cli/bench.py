"""`grpo-run bench memory`: measure where the memory of an RLOO step goes, and draw it.

Starts the script of `trainers/rloo/` once for each setting and k, each in its own process, and writes a
table, three pictures and the measurements into one directory. Needs no GPU; without one, live bytes of
tensors on the CPU are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.files import replace_file, write_json
from grpo_run.runtime.upstream.features import MEMORY_EXPERIMENT, check_available
from grpo_run.runtime.upstream.versions import check_extra
from grpo_run.trainers.rloo.switches import METHODS, ONLY_SCORES, ONLY_TEXT, Switches, name_of, settings_for

MIB = float(1 << 20)
PHASES = ("generate", "score", "train", "optimizer")
TAIL_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one setting needed.

    Attributes:
        peak_bytes: highest number of live bytes; where memory was exhausted, until then.
        peaks: the same by phase.
        series: seconds, live bytes, and phase.
        exhausted: the error, or None if the run finished.
    """

    switches: Switches
    k: int
    peak_bytes: int
    peaks: Mapping[str, int]
    series: Sequence[tuple[float, int, str]]
    exhausted: str | None


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, and write all files; returns the exit code."""
    parser = CommandParser(prog="grpo-run bench", description="Run an experiment of grpo-run.")
    commands = parser.add_subparsers(dest="experiment", required=True)
    memory = commands.add_parser("memory", help="where the memory of an RLOO step goes")
    memory.add_argument("--methods", default=",".join(METHODS), metavar="NAMES", help="default: %(default)s")
    memory.add_argument("--k", default="2,4,8", metavar="NUMBERS", help="completions (default: %(default)s)")
    memory.add_argument("--grid", action="store_true", help="measure all 24 settings of the switches")
    memory.add_argument("--vocabulary", type=int, default=151_936, help="default: %(default)s")
    memory.add_argument("--completion-tokens", type=int, default=32, help="default: %(default)s")
    memory.add_argument("--prompts", type=int, default=2, help="of a step (default: %(default)s)")
    memory.add_argument("--steps", type=int, default=2, help="default: %(default)s")
    memory.add_argument("--limit-bytes", type=int, help="live bytes above which memory is exhausted")
    memory.add_argument("--out", type=Path, default=Path("bench-memory"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    methods, ks = options.methods.split(","), _numbers(options.k)
    for name in methods:
        if name not in METHODS:
            raise UsageError(f"no method {name!r}; methods: {', '.join(METHODS)}")
    words = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("vocabulary", "completion_tokens", "prompts", "steps", "limit_bytes")
        if getattr(options, name) is not None
    ]
    check_extra("grpo-run bench memory", "matplotlib")
    check_available(MEMORY_EXPERIMENT)
    options.out.mkdir(parents=True, exist_ok=True)
    measured = []
    for k in ks:
        for switches in settings_for(methods, grid=options.grid):
            measured.append(measure(switches, k, words, options.out))
            print(f"k = {k}, {name_of(switches)}: {_size(measured[-1])}", flush=True)
    write_results(measured, methods, ks, options.out)
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 2:
        raise UsageError(f"--k {text!r}: expected numbers from 2 on, such as 2,4,8")
    return numbers


def measure(switches: Switches, k: int, words: Sequence[str], out: Path) -> Measurement:
    """Train one setting in a process of its own.

    Raises:
        ConfigError: it failed otherwise than by exhausted memory.
    """
    folder = out / "runs" / f"k{k}-{str(switches).replace(', ', '-')}"
    result = folder / "memory.json"
    result.unlink(missing_ok=True)
    command = [
        sys.executable, "-P", "-m", "grpo_run.trainers.rloo", f"--k={k}", f"--output-dir={folder}",
        *(f"--{name}={value}" for name, value in vars(switches).items()), *words,
    ]  # fmt: skip
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if not found or (answer.returncode != 0 and found["exhausted"] is None):
        raise ConfigError(
            f"bench memory: {switches} failed with code {answer.returncode}:"
            f" {answer.stderr[-TAIL_CHARACTERS:]}"
        )
    return Measurement(
        switches=switches, k=k, peak_bytes=found["peak_bytes"], peaks=found["peaks"],
        series=found["series"], exhausted=found["exhausted"],
    )  # fmt: skip


def _size(one: Measurement) -> str:
    return f"{one.peak_bytes / MIB:.0f} MiB" if one.exhausted is None else "out of memory"


def write_results(
    measured: Sequence[Measurement], methods: Sequence[str], ks: Sequence[int], out: Path
) -> None:
    """Print the table, and write it with pictures and measurements."""
    from grpo_run.dashboards.rloo_memory_plot import draw_bars, draw_over_time

    by_place = {(one.switches, one.k): one for one in measured}
    first, base = methods[0], METHODS[methods[0]]
    table = table_of(measured, base)
    print(table)
    replace_file(out / "table.md", table.encode(), mode=0o644)
    write_json(out / "measurements.json", [asdict(one) for one in measured])

    def drawn(value: Callable[[Measurement], float | None]) -> dict[str, dict[int, float | None]]:
        return {name: {k: value(by_place[METHODS[name], k]) for k in ks} for name in methods}

    largest = max(ks)
    pictures = {
        "peaks": draw_bars(
            "Peak memory of an RLOO step",
            "highest live bytes (MiB)",
            drawn(lambda one: one.peak_bytes / MIB if one.exhausted is None else None),
            "{:.0f}",
        ),
        "over-time": draw_over_time(
            {name: by_place[METHODS[name], largest].series for name in methods}, largest
        ),
        "savings": draw_bars(
            f"Savings over {first}",
            f"lower peak than {first} (%)",
            drawn(lambda one: saving(one, by_place[base, one.k])),
            "{:.1f} %",
        ),
    }
    for name, content in pictures.items():
        replace_file(out / f"{name}.png", content, mode=0o644)


def table_of(measured: Sequence[Measurement], base: Switches) -> str:
    """Return the measurements as a table in Markdown, and the split of `string`'s saving."""
    lines = [
        f"| k | expansion, scores, head | peak | {' | '.join(PHASES)} | saving |",
        "|---|---|---|" + "---|" * (len(PHASES) + 1),
    ]
    bases = {one.k: one for one in measured if one.switches == base}
    for one in measured:
        share = saving(one, bases[one.k])
        method = name_of(one.switches)
        name = f"{method} ({one.switches})" if method in METHODS else method
        phases = " | ".join(f"{one.peaks.get(phase, 0) / MIB:.0f}" for phase in PHASES)
        saved = "" if share is None else f"{share:.1f} %"
        lines.append(f"| {one.k} | {name} | {_size(one)} | {phases} | {saved} |")
    return "\n".join([*lines, "", *(one for k in bases for one in split_saving(measured, k))]) + "\n"


def saving(found: Measurement, base: Measurement) -> float | None:
    """Return by how many percent a peak is lower; None if one of the runs did not finish."""
    if found.exhausted is not None or base.exhausted is not None:
        return None
    return 100 * (1 - found.peak_bytes / base.peak_bytes)


def split_saving(measured: Collection[Measurement], k: int) -> Iterator[str]:
    """Yield a sentence on which part of `string`'s saving is the string and which the scores.

    There is none if one of the four settings was not measured, or did not finish.
    """
    peaks = {one.switches: one.peak_bytes / MIB for one in measured if one.k == k and one.exhausted is None}
    corners = (METHODS["basic"], METHODS["string"], ONLY_SCORES, ONLY_TEXT)
    if peaks.keys() >= set(corners):
        basic, string, scores, text = (peaks[corner] for corner in corners)
        yield (
            f"k = {k}: `string` saves {basic - string:.0f} MiB; reduced scores alone save"
            f" {basic - scores:.0f} MiB, the string alone {basic - text:.0f} MiB; the string adds"
            f" {scores - string:.0f} MiB to reduced scores."
        )
