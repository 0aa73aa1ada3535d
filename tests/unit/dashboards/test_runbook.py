"""The runbook has a section for each alert, at the anchor that the alert links to."""

from __future__ import annotations

from html import escape

from support.provisioned import RULES

from grpo_run.dashboards.runbook import html


def test_every_alert_links_to_its_section() -> None:
    """Grafana and Alertmanager show the link; the section has the alert's description."""
    page = html()
    sections = page.split("<section ")[1:]
    assert len(sections) == len(RULES)
    for rule, section in zip(RULES, sections, strict=True):
        anchor = rule["annotations"]["runbook_url"].partition("#")[2]
        assert section.startswith(f'id="{anchor}">')
        assert escape(rule["annotations"]["description"]) in section
        assert escape(rule["expr"]) in section


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """The machine that shows it may reach no other."""
    assert "<script" not in html()
    assert "http" not in html().partition("<section")[0]
