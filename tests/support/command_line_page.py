"""Write the options of `grpo-run launch` into docs/reference/command-line.md, and torchrun's into
docs/reference/torchrun.md; run by `make generated`."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command-line.md"
TORCHRUN_PAGE = PAGE.with_name("torchrun.md")
BEGIN, END = "<!-- generated: launch -->", "<!-- end: launch -->"


def page(text: str) -> str:
    """Return the page with the current help text, without torchrun's own options."""
    from grpo_run.cli.launching.options import EXIT_CODES, TORCHRUN_TITLE, build_parser

    options, _, rest = build_parser().format_help().partition(f"\n{TORCHRUN_TITLE}:")
    ours = f"{options}\n{rest[rest.index(EXIT_CODES) :].rstrip()}"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n```\n{ours}\n```\n\n{END}{after}"


def torchrun_page(text: str) -> str:
    """Return the page of torchrun's options with the current table."""
    from grpo_run.cli.launching.options import MODULE
    from grpo_run.runtime.launching.torchrun import REFUSALS, declared_options, option_names

    declared = [*((name, found) for name, _, found in declared_options()), ("module", MODULE)]
    rows = ["| option | here | |", "|---|---|---|"]
    for name, found in declared:
        names = option_names(name, found)
        reason = REFUSALS.get(name)
        state, what = ("honoured", found.help) if reason is None else ("refused", reason)
        rows.append(
            f"| {', '.join(f'`{name}`' for name in names)} | {state} | {what.replace('|', chr(92) + '|')} |"
        )
    begin, end = "<!-- generated: torchrun -->", "<!-- end: torchrun -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{chr(10).join(rows)}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    for path, made in ((PAGE, page), (TORCHRUN_PAGE, torchrun_page)):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)
