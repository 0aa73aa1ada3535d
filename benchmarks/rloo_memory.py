"""Measure where the memory of an RLOO step goes, and draw it.

Starts `scripts/rloo_memory.py` once for each setting and k, each in its own process, and writes a table,
three pictures and the measurements into one directory. Needs no GPU; without one, live bytes of tensors on
the CPU are counted.

    benchmarks/rloo_memory.py                 18 settings, about 10 minutes on two cores
    benchmarks/rloo_memory.py --k 8 --grid    all 24 settings of the switches
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts.rloo_switches import METHODS, ONLY_SCORES, ONLY_TEXT, Switches, name_of, settings_for

from grpo_run.runtime.files import write_json

SCRIPT = Path(__file__).parent / "scripts" / "rloo_memory.py"
MIB = float(1 << 20)
COLORS = ("#2b5f83", "#5d9cb8", "#e3ac4f", "#cc6b49", "#8a6fb0", "#7d8fa0")
INK, QUIET, RULE = "#22303c", "#64727f", "#e6ebef"
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


def main(words: Sequence[str]) -> int:
    """Measure, print the table, and write all files; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure where the memory of an RLOO step goes.")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 8], help="completions, 2 or more")
    parser.add_argument("--grid", action="store_true", help="measure all 24 settings of the switches")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-bytes", type=int, help="live bytes above which memory is exhausted")
    parser.add_argument("--out", type=Path, default=Path("rloo-memory"))
    options = parser.parse_args(words)
    given = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("vocabulary", "completion_tokens", "prompts", "steps", "limit_bytes")
        if getattr(options, name) is not None
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    measured = []
    for k in options.k:
        for switches in settings_for(options.methods, grid=options.grid):
            measured.append(measure(switches, k, given, options.out))
            print(f"k = {k}, {name_of(switches)}: {_size(measured[-1])}", flush=True)
    write_results(measured, options.methods, options.k, options.out)
    return 0


def measure(switches: Switches, k: int, words: Sequence[str], out: Path) -> Measurement:
    """Train one setting in a process of its own.

    Raises:
        RuntimeError: it failed otherwise than by exhausted memory.
    """
    folder = out / "runs" / f"k{k}-{str(switches).replace(', ', '-')}"
    result = folder / "memory.json"
    result.unlink(missing_ok=True)
    command = [
        sys.executable, str(SCRIPT), f"--k={k}", f"--output-dir={folder}",
        *(f"--{name}={value}" for name, value in vars(switches).items()), *words,
    ]  # fmt: skip
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if not found or (answer.returncode != 0 and found["exhausted"] is None):
        raise RuntimeError(
            f"{switches} failed with code {answer.returncode}: {answer.stderr[-TAIL_CHARACTERS:]}"
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
    by_place = {(one.switches, one.k): one for one in measured}
    first, base = methods[0], METHODS[methods[0]]
    table = table_of(measured, base)
    print(table)
    (out / "table.md").write_text(table)
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
        (out / f"{name}.png").write_bytes(content)


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


def draw_bars(title: str, label: str, values: Mapping[str, Mapping[int, float | None]], text: str) -> bytes:
    """Return bars of a figure by setting and k.

    Args:
        label: of the figure, with its unit.
        values: by setting and k; None stands for exhausted memory.
        text: format of the number above a bar.
    """
    figure, axes = _empty(title, label)
    ks = list(next(iter(values.values())))
    width = 0.84 / len(values)
    for number, (name, by_k) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(ks))]
        heights = [by_k[k] or 0.0 for k in ks]
        bars = axes.bar(places, heights, 0.94 * width, color=COLORS[number % len(COLORS)], label=name)
        labels = ["out of\nmemory" if by_k[k] is None else text.format(by_k[k]) for k in ks]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])
    axes.axhline(0, color=INK, linewidth=0.8)
    return _png(figure, axes)


def draw_over_time(series: Mapping[str, Sequence[tuple[float, int, str]]], k: int) -> bytes:
    """Return live bytes over the share of each run's time, with its duration in the legend."""
    figure, axes = _empty(f"Memory over time, k = {k}", "live bytes (MiB)")
    for (name, points), color in zip(series.items(), COLORS * len(series), strict=False):
        seconds = [point[0] for point in points]
        length = max(seconds[-1] - seconds[0], 1e-9)
        shares = [100 * (one - seconds[0]) / length for one in seconds]
        label = f"{name} ({length:.0f} s)"
        axes.plot(shares, [point[1] / MIB for point in points], color=color, linewidth=1, label=label)
    axes.set_xlabel("share of the run's time (%)", color=QUIET)
    return _png(figure, axes)


def _empty(title: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 5.4))
    figure.text(0.03, 0.94, title, fontsize=13, color=INK)
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.68))
    axes.set_ylabel(label, color=QUIET)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)
    axes.spines[["top", "left", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure, axes: Axes) -> bytes:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 1.01), ncols=3, frameon=False, fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
