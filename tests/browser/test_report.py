"""The report in a real browser without a network: charts are drawn, and scripts in quoted texts do not run.

Requires Chromium; `tests/support/install-chromium.sh` installs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.incidents import HOSTILE, SENTENCE, write_incident

from grpo_run.cli.main import main

SECONDS = 120.0


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of the browser."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found is not None, "Chromium is not installed; run tests/support/install-chromium.sh"
    return found


def opened(chromium: str, page: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """The page's DOM after its scripts have run, and the messages of the browser's console."""
    ran = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1200,2400",
            "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    return ran.stdout, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report written by the command."""
    monkeypatch.chdir(tmp_path)
    write_incident(tmp_path)
    assert main(["report", "night", "--output", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


LIGHT, DARK = "rgb(29, 39, 51)", "rgb(228, 232, 236)"
"""The text color of the charts in the two schemes."""


def test_the_report_is_complete_without_a_network(chromium: str, page: Path) -> None:
    """The page shows the sentence and the chart, and the browser reports no error."""
    shown, console = opened(chromium, page)
    assert console == []
    assert f"<h1>{SENTENCE}</h1>" in shown
    drawn = re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)
    assert drawn.count('class="main-svg"') >= 1
    assert drawn.count('class="barlayer') >= 1
    assert len(re.findall(r'<g class="point">', drawn)) > 40
    assert ">forward_backward</text>" in drawn
    assert LIGHT in shown
    assert DARK not in drawn


@pytest.fixture(scope="module")
def hostile(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What `opened` returns of a report with script tags in every text, in the dark scheme."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_incident(folder, sentence=HOSTILE, advice=[HOSTILE], traceback=HOSTILE)
        assert main(["report", "night", "--output", str(folder / "report.html")]) == 0
    return opened(chromium, folder / "report.html", dark=True)


def test_the_charts_follow_the_color_scheme(hostile: tuple[str, list[str]]) -> None:
    """Their text has the color of the dark scheme; the test above has the light one."""
    assert DARK in hostile[0]


def test_scripts_in_quoted_texts_do_not_run(hostile: tuple[str, list[str]]) -> None:
    """A message with script tags is shown as text."""
    shown, console = hostile
    assert console == []
    assert "<title>taken</title>" not in shown
    assert 'class="main-svg"' in shown


def test_the_policy_blocks_an_unescaped_script(chromium: str, page: Path) -> None:
    """The browser does not run an unescaped script, because the content security policy forbids it."""
    text = page.read_text().replace("<footer>", "<script>document.title='taken'</script><footer>")
    page.write_text(text)
    shown, console = opened(chromium, page)
    assert "<title>taken</title>" not in shown
    assert any("Content Security Policy" in line for line in console)
