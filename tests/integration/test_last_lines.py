"""Every failure says in its last line what failed and where, as the table of docs/reference/lifecycle.md has
it.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from support.last_lines import GROUPS, row, rows_of_page
from support.runs import SCRIPTS, Runs

from grpo_run.dashboards.live.feed import RunFeed
from grpo_run.runtime.history.run_directory import RunDirectory

QUICK = {("at start", 'sys.exit("text")'), ("at start", "a directory that cannot be written")}
"""With those before a start: the others take minutes."""
CASES = [
    pytest.param(when, way, marks=() if when == "before" or (when, way) in QUICK else pytest.mark.full)
    for when, ways in GROUPS.items()
    for way in ways
]


@pytest.mark.parametrize(("when", "way"), CASES)
def test_the_last_line_of_a_failure_is_that_of_the_table(tmp_path: Path, when: str, way: str) -> None:
    """A real launch, with its exit code. A launch that is refused leaves no run directory."""
    assert row(tmp_path, when, way) in rows_of_page()
    assert (tmp_path / "runs").exists() is (when != "before")


def test_the_table_has_each_way_once() -> None:
    """At least thirty, and none that is not launched."""
    assert [tuple(line.split(" | ")[:2]) for line in rows_of_page()] == [
        (f"| {when}", way) for when, ways in GROUPS.items() for way in ways
    ]
    assert len(rows_of_page()) >= 30


def test_the_last_line_is_the_same_sentence_everywhere(runs: Runs, tmp_path: Path) -> None:
    """On the terminal, the live page, in `status`, the report and what `--on-end` gets."""
    run = runs(
        "--on-end", "cat > end.json", str(SCRIPTS / "failing.py"), "at start", 'sys.exit("text")'
    ).start().ended(93)  # fmt: skip
    sentence = run.status()["sentence"]
    assert "no data in /data" in sentence
    assert "failing.py:42" in sentence
    assert run.printed().splitlines()[-1].endswith(f"grpo-run: {sentence}")
    assert json.loads((tmp_path / "end.json").read_text())["sentence"] == sentence
    feed = RunFeed(RunDirectory(path=run.directory))
    feed.read()
    assert f"{feed.shown['run']['sentence']} {feed.shown['run']['also']}".strip() == sentence
    run.command("report")
    page = re.sub(r"<[^>]+>", " ", (run.directory / "report.html").read_text())
    assert sentence in " ".join(html.unescape(page).split())
