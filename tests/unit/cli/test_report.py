"""`grpo-run report`: write a page, or refuse in one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from support.incidents import SENTENCE, write_incident
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A run with two incidents."""
    write_incident(here, name="0002-signal", sentence="Rank 0 was killed by SIGKILL in step 8.")
    return write_incident(here)


def test_the_last_incident_is_written_to_its_folder(run: RunDirectory, capsys: Captured) -> None:
    """With mode 0600; its path is printed."""
    assert main(["report", "--incident", "last"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == Path("runs/night/incidents/0002-signal/report.html")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = path.read_text()
    assert "Rank 0 was killed by SIGKILL in step 8." in page
    assert len(page) < 100_000
    assert [file.name for file in path.parent.glob(".*")] == []


def test_an_incident_and_a_file_may_be_chosen(run: RunDirectory, here: Path, capsys: Captured) -> None:
    """The file is replaced, and nothing is written to the run directory."""
    (here / "page.html").write_text("old")
    assert main(["report", "night", "--incident", "1", "--output", "page.html"]) == 0
    assert capsys.readouterr().out == "page.html\n"
    assert SENTENCE in (here / "page.html").read_text()
    assert stat.S_IMODE((here / "page.html").stat().st_mode) == 0o600
    assert not list(run.path.rglob("report.html"))


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--incident", "9"], "known incidents: 1, 2"),
        (["--incident", "first"], "known incidents: 1, 2"),
        (["--incident", "1", "--format", "json"], "HTML only"),
        (["--output", "no/such/folder/page.html"], "--output"),
        (["--output", "runs"], "--output"),
        (["--output", "train.py/page.html"], "--output"),
        (["other"], "not a run directory"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: Captured, words: list[str], hint: str) -> None:
    """Exit code 2; the line names what was searched and what exists."""
    assert main(["report", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("grpo-run: ")
    assert shown.err.count("\n") == 1
    assert hint in shown.err


def test_a_run_without_incidents_is_refused_in_one_line(run: RunDirectory, capsys: Captured) -> None:
    """Exit code 2."""
    for path in sorted(run.incidents.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert main(["report", "night", "--incident", "last"]) == 2
    assert "no incidents" in capsys.readouterr().err


def test_the_findings_of_the_memory_trace_are_on_the_page(run: RunDirectory, capsys: Captured) -> None:
    """Those of the whole run, escaped."""
    journal = Journal(run.journal, "night")
    journal.attempt = 0
    journal.write(
        event("memory_finding", rank=0, step=8, world_size=1, key="a", subject="b",
        sentence="held by list of <Collector>"
    ))  # fmt: skip
    assert main(["report", "--incident", "last"]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert "held by list of &lt;Collector&gt;" in page


def test_the_whole_run_is_the_default(run: RunDirectory, capsys: Captured) -> None:
    """The page is written to the run's directory with mode 0600, and lists the incidents."""
    assert main(["report", "night"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == Path("runs/night/report.html")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "--incident N" in path.read_text()


@pytest.mark.usefixtures("run")
def test_markdown_and_json_are_printed_or_written(here: Path, capsys: Captured) -> None:
    """They are printed unless a file is named."""
    assert main(["report", "night", "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("# ")
    assert main(["report", "night", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "night"
    assert main(["report", "night", "--format", "json", "--output", "report.json"]) == 0
    assert capsys.readouterr().out == "report.json\n"
    assert json.loads((here / "report.json").read_text())["run_id"] == "night"
    assert not (here / "runs" / "night" / "report.html").exists()
