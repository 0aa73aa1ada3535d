"""Explanations of observed memory as text of 80 columns, and as JSON. Called by `plan.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_run.cli.text.paragraph import print_paragraph
from grpo_run.trainers.planning.explaining.assumptions import Explanation
from grpo_run.trainers.planning.explaining.pairs import CLOSE

_GIB = 1 << 30


def print_explained(
    order: Sequence[Explanation], observed_bytes: int, floor: tuple[float, str], pairs: Sequence[Explanation]
) -> None:
    """Print explanations, the best fit first, with their arithmetic.

    Args:
        order: single assumptions.
        observed_bytes: what was observed.
        floor: what the job cannot do without, in bytes, and how it comes about.
        pairs: two assumptions together.
    """
    least, parts = floor
    print_paragraph(
        f"Observed: {observed_bytes / _GIB:.2f} GiB. No implementation of this job needs less than {least / _GIB:.2f} GiB"
        f" ({parts}), so a smaller figure was never right."
    )
    if not accounted_for(order, observed_bytes):
        print_paragraph(
            f"No single assumption accounts for it; {'two together do' if pairs else 'several together may'}."
        )
    print("\nWhat one wrong assumption would need, the best fit first:\n")
    _print_list(order, observed_bytes)
    if pairs:
        print(f"\nTwo of them together that come within {100 * (CLOSE - 1):.0f} %, the best fit first:\n")
        _print_list(pairs, observed_bytes)
    print()
    print_paragraph(
        "On top of the job as described. A fit is no proof. Compared with real runs on a CPU only, never with a GPU."
    )


def accounted_for(order: Sequence[Explanation], observed_bytes: int) -> bool:
    """Whether a single assumption comes close to an observation."""
    return order[0].distance(observed_bytes) <= math.log(CLOSE)


def explained_json(
    order: Sequence[Explanation], observed_bytes: int, floor: tuple[float, str], pairs: Sequence[Explanation]
) -> dict[str, Any]:
    """Return explanations for programs; sizes in bytes."""
    return {
        "observed_bytes": observed_bytes,
        "floor_bytes": round(floor[0]),
        "accounted_for": accounted_for(order, observed_bytes),
        "explanations": [_one(one, observed_bytes) for one in order],
        "pairs": [_one(one, observed_bytes) for one in pairs],
    }


def _one(one: Explanation, observed_bytes: int) -> dict[str, Any]:
    return {
        "name": one.name,
        "assumption": one.assumption,
        "arithmetic": one.arithmetic,
        "allocated_bytes": round(one.allocated_bytes),
        "ratio": one.allocated_bytes / observed_bytes,
    }


def _print_list(order: Sequence[Explanation], observed_bytes: int) -> None:
    for number, one in enumerate(order, 1):
        ratio = one.allocated_bytes / observed_bytes
        print_paragraph(
            f"{number:>2}. {one.allocated_bytes / _GIB:.2f} GiB ({ratio:.2f} of observed): {one.assumption}",
            "    ",
        )
        print_paragraph(f"    {one.arithmetic}", "    ")
