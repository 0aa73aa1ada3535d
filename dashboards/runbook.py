"""The runbook of the alerts as a page: what each means, what grpo-run does, and what to do.

Served at `/runbook`, by a run and by `grpo-run serve`, so that the link of an alert works without the
repository. It has no token: it says nothing of a run. What it says is the alert's own description.
"""

from __future__ import annotations

import functools
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
STYLE: Final = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;"
    "padding:0 1rem}pre{white-space:pre-wrap;font-size:.8rem;opacity:.8}:target{background:#fd83}"
)


@functools.cache
def html() -> str:
    """Return the page: a section for each alert, whose anchor is its name in lower case."""
    from grpo_run.dashboards.provisioning import alert_rules

    sections = "".join(
        f'<section id="{escape(rule["alert"].lower())}"><h2>{escape(rule["alert"])}</h2>'
        f"<p><em>{escape(rule['labels']['severity'])}</em></p>"
        f"<p>{escape(rule['annotations']['description'])}</p><pre>{escape(rule['expr'])}</pre></section>"
        for rule in alert_rules()["groups"][0]["rules"]
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>grpo-run: alerts</title><style>{STYLE}</style><h1>Alerts of grpo-run</h1>{sections}"
    )


async def runbook(request: Request) -> Response:
    """Answer with the page."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(html(), headers=HEADERS)
