"""Paragraphs of 80 columns. Called by commands that print sentences."""

from __future__ import annotations

import textwrap

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
