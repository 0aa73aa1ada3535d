"""Write docs/reference/alerts.md, which has a section for each alert rule; run by `make generated`."""

from __future__ import annotations

from support.provisioned import FOLDER, RULES

PAGE = FOLDER / "docs" / "reference" / "alerts.md"
LABELS = ("What it means", "What grpo-run does", "What to do")
"""Of the three lines of a description."""
HEAD = """# Alerts

The rules that `grpo-run dashboards export` writes. This page is generated from them (`make generated`).

A recovery takes a second or two and a scrape comes every 15 s, so the alerts about faults rest on counters:
they fire when one has risen within 5 minutes. Each cause belongs to one alert. A run that ends well raises
`GrpoRunFinished` only.
"""


def alerts_page() -> str:
    """Return the page's text."""
    page = HEAD
    for rule in RULES:
        lines = zip(LABELS, rule["annotations"]["description"].splitlines(), strict=True)
        says = "\n".join(f"- **{label}.** {text}" for label, text in lines)
        after = f", after {rule['for']}" if "for" in rule else ""
        page += (
            f"\n## {rule['alert']}\n\n*{rule['labels']['severity']}*{after}\n\n{says}\n"
            f"\n```\n{rule['expr']}\n```\n"
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(alerts_page(), encoding="utf-8")
    print(PAGE)
