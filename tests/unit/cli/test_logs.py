"""`grpo-run logs`: which lines it prints, and how it follows a run."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from grpo_run.cli import logs as module
from grpo_run.cli.main import main
from grpo_run.runtime.history.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def printed(run: RunDirectory) -> RunDirectory:
    """A run with two attempts of two ranks."""
    for attempt in range(2):
        folder = run.attempt(attempt)
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"rank{rank}.log").write_text("".join(f"{attempt}{rank}{n}\n" for n in range(3)))
    return run


ALL = [f"[rank{rank}] 0{rank}{n}" for rank in range(2) for n in range(3)] + ["--- attempt 1 ---"] + [
    f"[rank{rank}] 1{rank}{n}" for rank in range(2) for n in range(3)
]  # fmt: skip


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("", ALL),
        ("night", ALL),
        ("-f", ALL),
        ("--since 1h", ALL),
        ("--since 2020-01-01T00:00", ALL),
        ("-n 0", ALL),
        ("--rank 1", ["010", "011", "012", "--- attempt 1 ---", "110", "111", "112"]),
        ("--rank 1 --attempt 0", ["010", "011", "012"]),
        ("--rank 0 --attempt -1 -n 1", ["102"]),
        ("--rank 0 --rank 1 --attempt 1 -n 1", ["[rank0] 102", "[rank1] 112"]),
    ],
)
def test_the_lines_that_were_asked_for_are_printed(words: str, lines: list[str], capsys: Captured) -> None:
    """In a pipe, all: attempt by attempt, with the rank before each line if there are several."""
    assert main(["logs", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rank 7", "--rank 7: there is no such rank here; the run has 0 to 1"),
        ("--rank x", "argument --rank: invalid int value: 'x'"),
        ("--attempt 9", "--attempt 9: there is no such attempt here; the run has 0 to 1"),
        ("--attempt -3", "--attempt -3: there is no such attempt here"),
        ("--since yesterday", "--since yesterday: give 90s, 15m, 2h, 1d, or a time as"),
        ("--since 99999-01-01", "--since 99999-01-01: give 90s"),
        ("-n many", "argument -n/--lines: invalid int value: 'many'"),
        ("day", "day is not a run directory"),
    ],
)
def test_what_is_not_there_is_one_line(words: str, said: str, capsys: Captured) -> None:
    """With exit code 2."""
    assert main(["logs", *words.split()]) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith(f"grpo-run: {said}")
    assert (answer.err.count("\n"), answer.out) == (1, "")


@pytest.mark.usefixtures("run")
def test_a_run_without_output_has_no_lines(capsys: Captured) -> None:
    """Refused before it began, for example."""
    assert main(["logs"]) == 0
    assert main(["logs", "--attempt", "-1"]) == 2
    assert "the run has none yet" in capsys.readouterr().err


def test_a_run_is_followed_until_it_ends(
    printed: RunDirectory, owned: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Also over a new attempt; a last line without an end is printed, too."""

    def train(seconds: float) -> None:
        """What happens between two looks: a new attempt, then the end."""
        if printed.attempt(2).exists():
            os.close(owned)
        else:
            printed.attempt(2).mkdir()
            (printed.attempt(2) / "rank0.log").write_text("again\nlast")

    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, sleep=train))
    assert main(["logs", "-f", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[rank0] 002", "[rank1] 012", "--- attempt 1 ---", "[rank0] 102", "[rank1] 112",
        "--- attempt 2 ---", "[rank0] again", "[rank0] last",
    ]  # fmt: skip
