"""The reports in a real browser without a network: charts are drawn, and scripts in quoted texts do not run.

Requires Chromium; `tests/support/install-chromium.sh` installs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Page, browser
from support.incidents import HOSTILE, SENTENCE, write_incident
from support.night import write_night

from grpo_run.cli.main import main
from grpo_run.dashboards.reports.incident_contents import find_incident, read_report
from grpo_run.dashboards.reports.incident_page import build
from grpo_run.dashboards.reports.run_contents import read_run_report
from grpo_run.dashboards.reports.run_page import as_html


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The browser of all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def opened(chromium: Page, page: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """The page's DOM after its scripts have run, and the messages of the browser's console."""
    chromium.show(width=1200, height=2400, dark=dark)
    chromium.open("about:blank")
    chromium.console.clear()
    chromium.open(page.as_uri())
    return chromium.value("document.documentElement.outerHTML"), list(chromium.console)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report written by the command."""
    monkeypatch.chdir(tmp_path)
    write_incident(tmp_path)
    assert main(["report", "night", "--incident", "1", "--output", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


def test_an_incident_is_complete_without_a_network(chromium: Page, page: Path) -> None:
    """The page shows the sentence and the timeline, and the browser reports no error and no request."""
    shown, console = opened(chromium, page)
    assert console == []
    assert f"<h1>{SENTENCE}</h1>" in shown
    assert shown.count("<rect") > 40
    assert "</i>forward_backward</li>" in shown


def test_a_run_is_complete_without_a_network(chromium: Page, tmp_path: Path) -> None:
    """Curves and wall time are drawn; texts that pretend to be HTML are shown as texts."""
    run = write_night(tmp_path, steps=300, sentence=HOSTILE)
    path = tmp_path / "report.html"
    path.write_text(as_html(read_run_report(run)))
    shown, console = opened(chromium, path, dark=True)
    assert console == []
    assert shown.count('class="mean l0"') == 4
    assert 'class="productive"' in shown
    assert "<title>taken</title>" not in shown
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown


def test_scripts_in_quoted_texts_do_not_run(chromium: Page, tmp_path: Path) -> None:
    """A message with script tags is shown as text."""
    run = write_incident(tmp_path, sentence=HOSTILE, advice=[HOSTILE], traceback=HOSTILE)
    path = tmp_path / "report.html"
    path.write_text(build(read_report(run, find_incident(run, None))))
    shown, console = opened(chromium, path)
    assert console == []
    assert "<title>taken</title>" not in shown
    assert "<rect" in shown


def test_the_policy_blocks_an_unescaped_script(chromium: Page, page: Path) -> None:
    """The browser does not run an unescaped script, because the content security policy forbids it."""
    text = page.read_text().replace("<footer>", "<script>document.title='taken'</script><footer>")
    page.write_text(text)
    shown, console = opened(chromium, page)
    assert "<title>taken</title>" not in shown
    assert any("Content Security Policy" in line for line in console)
