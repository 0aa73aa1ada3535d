"""Explanations of observed memory as text of 80 columns, and as JSON. Called by `plan.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_run.cli.text.paragraph import print_paragraph
from grpo_run.trainers.planning.explaining.assumptions import Explanation

_GIB = 1 << 30
FITTING = 1.25
"""Ratio of a figure to the observation, either way, up to which an assumption is said to account for it."""


def print_explained(order: Sequence[Explanation], observed_bytes: int, floor: tuple[float, str]) -> None:
    """Print explanations, the best fit first, with their arithmetic."""
    least, parts = floor
    print_paragraph(
        f"Observed: {observed_bytes / _GIB:.2f} GiB. No implementation of this job needs less than {least / _GIB:.2f} GiB"
        f" ({parts}), so a smaller figure was never right."
    )
    if max(order[0].allocated_bytes, observed_bytes) > FITTING * min(
        order[0].allocated_bytes, observed_bytes
    ):
        print_paragraph("No single assumption accounts for it; several together may.")
    print("\nWhat one wrong assumption would need, the best fit first:\n")
    for number, one in enumerate(order, 1):
        ratio = one.allocated_bytes / observed_bytes
        print_paragraph(
            f"{number:>2}. {one.allocated_bytes / _GIB:.2f} GiB ({ratio:.2f} of observed): {one.assumption}",
            "    ",
        )
        print_paragraph(f"    {one.arithmetic}", "    ")
    print()
    print_paragraph(
        "Each assumption alone, on top of the job as described. A fit is no proof. Compared with real runs on a CPU only, never with a GPU."
    )


def explained_json(
    order: Sequence[Explanation], observed_bytes: int, floor: tuple[float, str]
) -> dict[str, Any]:
    """Return explanations for programs; sizes in bytes."""
    return {
        "observed_bytes": observed_bytes,
        "floor_bytes": round(floor[0]),
        "explanations": [
            {
                "name": one.name,
                "assumption": one.assumption,
                "arithmetic": one.arithmetic,
                "allocated_bytes": round(one.allocated_bytes),
                "ratio": one.allocated_bytes / observed_bytes,
            }
            for one in order
        ],
    }
