"""Pieces of HTML that a page is put together from; every text that comes in is escaped here.

Called by `page.py`. What is named `content` is HTML already. Pure; knows nothing of runs.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from typing import Any

MAX_TEXT = 32_000
"""Characters of one text; a longer one is cut."""


def section(title: str, content: str) -> str:
    """A heading with what belongs under it; `content` is HTML."""
    return f"<section><h2>{title}</h2>{content}</section>\n"


def chart(name: str, label: str) -> str:
    """A place for the chart called `name`, `label` being what it is to who cannot see it."""
    return (
        f'<div class="card chart"><div id="{name}" role="img" aria-label="{label}">'
        "<noscript>This chart needs JavaScript.</noscript></div></div>"
    )


def none(sentence: str) -> str:
    """What there is instead of a section's content."""
    return f'<p class="none">{text(sentence)}</p>'


def listed(items: Iterable[Any]) -> str:
    """A list of texts."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    codes: Collection[int] = (),
    long: int | None = None,
) -> str:
    """A table of texts; columns of `numbers`, of `codes`, and the one `long` column are set as such."""

    def kind(column: int) -> str:
        names = [("number", column in numbers), ("code", column in codes), ("long", column == long)]
        chosen = " ".join(name for name, holds in names if holds)
        return f' class="{chosen}"' if chosen else ""

    head = "".join(
        f"<th{kind(column) if column in numbers else ''}>{text(name)}</th>"
        for column, name in enumerate(heads)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind(column)}>{text(cell)}</td>' for column, cell in enumerate(row))}</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(value: Any) -> str:
    """Escaped, bounded, and in characters that can be written: messages may hold lone surrogates."""
    words = str(value)
    words = words if len(words) <= MAX_TEXT else words[:MAX_TEXT] + "…"
    return html.escape(words.encode(errors="backslashreplace").decode())
