"""What the pages of reports share: the template engine, and a policy that loads nothing.

Called by `run_page.py` and `incident_page.py`. Reports quote messages, which may come from anywhere: every
value is cut, freed of control characters and escaped, in Markdown where a template asks for it. A page has no
script, and its Content-Security-Policy forbids all scripts and connections.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.reports import incident_facts
from grpo_run.dashboards.reports.charts import number_text

MAX_TEXT_CHARACTERS = 32_000
"""A longer text is cut."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """Return a page, or Markdown.

    Args:
        template: name of the file.
        values: what it shows; in HTML all but `Markup` is escaped.
    """
    style = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return _environment().get_template(template).render(policy=POLICY, style=style, **values)


def markdown_line(text: str) -> str:
    """Return a text for one line of Markdown, without HTML and links."""
    line = " ".join(text.split())
    for character in "\\`|<[":
        line = line.replace(character, f"\\{character}")
    return line


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: name is None or name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value, MAX_TEXT_CHARACTERS),
    )
    names = ("duration", "size", "utc_time", "relative_time", "seconds_before", "event_fields")
    environment.filters.update({name: getattr(incident_facts, name) for name in names})
    environment.filters |= {"cut": clean, "line": markdown_line, "number_text": number_text}
    return environment
