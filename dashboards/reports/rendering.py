"""What the pages of reports share: the template engine, texts made safe, and a policy that loads nothing.

Called by `run_page.py` and `incident_page.py`. Reports quote messages, which may come from anywhere: every
value is cut, freed of control characters and escaped. A page has no script, and its
Content-Security-Policy forbids all scripts and connections.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from grpo_run.dashboards.reports import incident_facts

MAX_TEXT_CHARACTERS = 32_000
"""A longer text is truncated."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_TEMPLATES = Path(__file__).with_name("templates")
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
)
"""Control characters, as a terminal obeys them, and orders of writing direction."""


def clean(value: Any, most: int = MAX_TEXT_CHARACTERS) -> str:
    """Return a text that neither a terminal nor a page obeys, and that can be encoded.

    Args:
        value: a text, or anything that is converted to a text.
        most: characters, beyond which it is cut.
    """
    text = str(value)
    text = text if len(text) <= most else text[:most] + "…"
    return text.translate(_VISIBLE).encode(errors="backslashreplace").decode()


def render(template: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: name of the file.
        values: what it shows; all but `Markup` is escaped.
    """
    style = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return _environment().get_template(template).render(policy=POLICY, style=style, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
    )
    names = ("duration", "size", "utc_time", "relative_time", "seconds_before", "event_fields")
    environment.filters.update({name: getattr(incident_facts, name) for name in names})
    environment.filters["cut"] = clean
    return environment
