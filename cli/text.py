"""Text that commands print: paragraphs of 80 columns, and tables with aligned columns.

Called by `grpo-run checkpoints` and `grpo-run plan`. Imports nothing of this project.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


def print_paragraph(text: str, hanging: str = "") -> None:
    """Print a paragraph; words and numbers are never broken.

    Args:
        text: of one paragraph.
        hanging: put before each line but the first.
    """
    print(
        textwrap.fill(text, WIDTH, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    )


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equally many words, the titles first. One line each, however long: a pipe may read it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
