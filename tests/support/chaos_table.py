"""What is shown of a fault campaign: a table in Markdown, the page of `docs/`, and one HTML page. Pure.

Called by `chaos.py` with the results of a work directory.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from support.chaos_faults import FAULTS, KINDS, STEPS

HEADS = (
    "kind",
    "what is done",
    "faults",
    "as specified",
    "cause",
    "rank",
    "weights",
    "detected, s",
    "recovered, s",
)


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of the table: one row for each kind that has happened, and the sum."""
    found = []
    for name, kind in KINDS.items():
        if there := [one for one in results if one["kind"] == name and one["done"]]:
            found.append([f"`{name}`", kind.done, *_cells(there)])
    return [*found, ["all", "", *_cells([one for one in results if one["done"]])]]


def _cells(there: Sequence[Mapping[str, Any]]) -> list[str]:
    total = len(there)
    exempt = sum(one["weights"] == "plan changed" for one in there)
    equal = f"{sum(one['weights'] == 'equal' for one in there)} of {total - exempt}"
    return [
        str(total), str(sum(not one["wrong"] for one in there)),
        *(f"{sum(one[name] for one in there) / total:.1%}" for name in ("cause_right", "rank_right")),
        equal + (f", {exempt} changed" if exempt else ""),
        *(_spread([one[name] for one in there]) for name in ("detected_seconds", "recovered_seconds")),
    ]  # fmt: skip


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} to {max(known):.1f}" if known else ""


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return date, size and seeds of a campaign in a sentence."""
    done = [one for one in results if one["done"]]
    kinds = len({one["kind"] for one in done})
    dates = sorted({one["at"][:10] for one in done})
    seeds = ", ".join(map(str, sorted({one["seed"] for one in done})))
    right = sum(not one["wrong"] for one in done)
    runs = len({(one["seed"], one["case"].partition(".")[0]) for one in done})
    return (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, seed {seeds}: {len(done):,} faults of {kinds}"
        f" kinds in {runs} runs, {right:,} as specified,"
        f" {sum(bool(one['left']) for one in done)} with something left behind."
    )


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    lines = [HEADS, ["---"] * len(HEADS), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}"
    "td{padding:.2rem .6rem;border-bottom:1px solid #8884;vertical-align:top}"
)


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return one HTML page without references to others."""

    def table(lines: Iterable[Sequence[str]]) -> str:
        cells = ["".join(f"<td>{html.escape(cell.strip('`'))}</td>" for cell in line) for line in lines]
        return "".join(f"<tr>{one}</tr>" for one in cells)

    bad = [
        (one["case"], one["kind"], f"{one['job']}, rank {one['rank']}, step {one['step']}, {one['phase']}",
         "; ".join(one["wrong"]), one["sentence"])
        for one in results if one["wrong"]
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Fault campaign</title>'
        f"<style>{STYLE}</style><h1>Fault campaign</h1><p>{summary(results)}</p>"
        f"<table>{table([HEADS, *rows(results)])}</table><h2>Not as specified: {len(bad)}</h2>"
        f"<table>{table(bad)}</table></html>"
    )


DOCUMENT = """# Fault campaign

{summary}

{table}

`make chaos` (`tests/support/chaos.py`) has run them; `make chaos FAULTS=0 TABLE=docs/reference/chaos.md` has
made this page. Jobs of 2 ranks on CPU and Gloo: GRPO, SFT, and a loop of its own with DDP; {steps} steps, a
checkpoint every 2, {faults} faults a run at drawn steps, ranks and phases; two runs at a time on a machine of
2 cores. `--deadline-floor` is 4 s. What must follow for each kind is in
`tests/support/chaos_faults.py`.

- *Cause* and *rank*: share of right verdicts; where nothing may be taken for a fault, of faults without one.
- *Weights*: equal to those of the undisturbed job after the last step; *changed* are faults of runs whose
  memory plan has changed how a step is computed.
- *Seconds*: median and maximum, from the fault to the verdict and to the next committed step.
"""


def document(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of `docs/`."""
    said, table = summary(results), markdown(results)
    return DOCUMENT.format(summary=said, steps=STEPS, faults=FAULTS, table=table)
