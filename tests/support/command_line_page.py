"""Write the options of `grpo-run launch` into docs/reference/command-line.md; run by `make generated`."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command-line.md"
BEGIN, END = "<!-- generated: launch -->", "<!-- end: launch -->"


def page(text: str) -> str:
    """Return the page with the current help text, without torchrun's own options."""
    from grpo_run.cli.launching.options import EXIT_CODES, TORCHRUN_TITLE, build_parser

    options, _, rest = build_parser().format_help().partition(f"\n{TORCHRUN_TITLE}:")
    ours = f"{options}\n{rest[rest.index(EXIT_CODES) :].rstrip()}"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n```\n{ours}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
