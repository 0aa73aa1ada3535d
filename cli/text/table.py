"""Tables with aligned columns. Called by `grpo-run ls` and `grpo-run checkpoints list`."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equally many words, the titles first. One line each, however long: a pipe may read it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
