"""The `grpo-run` command: subcommands, exit codes, one-line errors."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from grpo_run.cli import main as main_module
from grpo_run.cli.main import main
from grpo_run.runtime.errors import ConfigError

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_is_the_installed_one(capsys: Captured, flag: str) -> None:
    """It is read from the package metadata."""
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"grpo-run {version('grpo-run')}\n"


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> list[object]:
    """Let every command return a code or raise; return what is imported and given."""
    seen: list[object] = []

    def command(words: list[str]) -> int:
        seen.append(words)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def load(name: str) -> SimpleNamespace:
        seen.append(name)
        return SimpleNamespace(main=command)

    monkeypatch.setattr(importlib, "import_module", load)
    return seen


def test_only_the_given_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It receives the arguments after its name, and its exit code is returned."""
    seen = stand_in(monkeypatch, 75)
    assert main(["launch", "train.py", "--lr", "1"]) == 75
    assert seen == ["grpo_run.cli.launch", ["train.py", "--lr", "1"]]


@pytest.mark.parametrize(
    ("name", "raised", "code", "line"),
    [
        ("launch", ConfigError("--stop-timeout 0: must be above 0"), 2, "--stop-timeout 0: must be above 0"),
        ("launch", KeyboardInterrupt(), 75, "interrupted"),
        ("train", KeyboardInterrupt(), 75, "interrupted"),
        ("status", KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_usage_errors_and_interrupts_are_one_line(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, name: str, raised: BaseException, code: int, line: str
) -> None:
    """The same command resumes a run that was interrupted; other commands exit as shells report SIGINT."""
    stand_in(monkeypatch, raised)
    assert main([name]) == code
    assert capsys.readouterr().err == f"grpo-run: {line}\n"


def test_an_internal_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug report needs the traceback."""
    stand_in(monkeypatch, KeyError("bug"))
    with pytest.raises(KeyError):
        main(["launch"])


def test_arguments_default_to_the_command_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main()` without arguments reads `sys.argv`."""
    monkeypatch.setattr(main_module.sys, "argv", ["grpo-run", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("grpo-run ")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_is_no_error(lines: int) -> None:
    """`grpo-run status --json | head -1` prints no traceback, however much was written before."""
    program = (
        "import importlib, sys, types\n"
        "from grpo_run.cli.main import main\n"
        f"command = lambda words: print('word\\n' * {lines}) or 0\n"
        "importlib.import_module = lambda name: types.SimpleNamespace(main=command)\n"
        "sys.exit(main(['status', '--json']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 141


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">&-", ""),
        ("<&- >&- 2>&-", ""),
        (">/dev/full", "grpo-run: standard output: No space left on device\n"),
    ],
)
def test_closed_or_full_output_changes_no_exit_code(redirection: str, said: str) -> None:
    """A run that has finished must not end with a traceback about its log."""
    command = f'"{sys.executable}" -P -m grpo_run.cli.main --version {redirection}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run(["sh", "-c", command], env=buffered, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, said)


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """What ranks print would go into it."""
    program = (
        "import os, sys\n"
        "from grpo_run.cli import main\n"
        "main._open_standard_streams()\n"
        "opened = os.open('/dev/zero', os.O_RDONLY)\n"
        "print('lost')\n"
        "sys.exit(opened)\n"
    )
    command = f'"{sys.executable}" -P -c "$0" <&- >&-'
    ran = subprocess.run(["sh", "-c", command, program], capture_output=True, text=True, timeout=60)
    assert ran.returncode >= 3, ran.stderr
