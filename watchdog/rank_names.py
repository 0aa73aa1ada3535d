"""Names of ranks in sentences for users: `rank 1`, `ranks 0, 2 and 3`, `ranks 0 to 6 and 9`."""

from __future__ import annotations

from collections.abc import Iterable

MIN_RANGE = 4
"""Shortest run of consecutive ranks that is written as a range."""


def rank_names(ranks: Iterable[int], *, capitalize: bool = False, ranges: bool = True) -> str:
    """Return the ranks as words, in ascending order.

    Args:
        capitalize: for the beginning of a sentence.
        ranges: write four or more consecutive ranks as a range: `ranks 0 to 6`.
    """
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        if ranges and len(run) >= MIN_RANGE:
            words.append(f"{run[0]} to {run[-1]}")
        else:
            words.extend(map(str, run))
    noun = "rank" if len(ordered) == 1 else "ranks"
    return f"{noun.capitalize() if capitalize else noun} {join_words(words)}"


def join_words(words: Iterable[str], *, last: str = "and") -> str:
    """Join words or clauses: `a`, `a and b`, `a, b and c`.

    Args:
        last: stands before the last one: `and` or `or`.
    """
    listed = list(words)
    return f" {last} ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)
