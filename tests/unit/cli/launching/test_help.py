"""The text of `grpo-run launch --help`."""

from __future__ import annotations

import pytest

from grpo_run.cli.launching import options as help_text
from grpo_run.cli.launching.options import build_parser


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The help on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return build_parser().format_help().splitlines()


def position(lines: list[str], start: str) -> int:
    """Number of the first line that starts so."""
    return next(number for number, line in enumerate(lines) if line.startswith(start))


def test_our_options_come_before_torchruns(lines: list[str]) -> None:
    """Usage, our groups, torchrun's options, then exit codes and examples, which stay on a terminal."""
    starts = [
        "usage: grpo-run launch", "run:", "  --run-id", "checkpoints", "hang detection", "display:",
        "  --show-ranks", "fault injection:", "torchrun's options:", "  --nnodes", "exit codes:", "examples:",
    ]  # fmt: skip
    found = [position(lines, start) for start in starts]
    assert found == sorted(found)


def test_every_line_fits_80_columns(lines: list[str]) -> None:
    """Long descriptions are folded; torchrun's own option names may be longer."""
    begin, end = position(lines, "torchrun's options:"), position(lines, "exit codes:")
    ours = [*lines[:begin], *lines[end:]]
    assert [line for line in ours if len(line) > 80] == []


@pytest.mark.parametrize("code", [0, 2, 75, 93])
def test_every_exit_code_is_explained(code: int) -> None:
    """One line for each."""
    assert any(line.split()[:1] == [str(code)] for line in help_text.EXIT_CODES.splitlines())


def test_every_option_with_a_value_says_its_default() -> None:
    """Options whose default is to do nothing are excepted."""
    nothing = {"--resume-from", "--accelerate-config", "--generation", "--inject"}
    groups = build_parser()._action_groups[:-1]
    silent = [
        action.option_strings[0]
        for group in groups
        for action in group._group_actions
        if action.nargs != 0 and "default:" not in (action.help or "")
    ]
    assert set(silent) == nothing


def test_the_short_help_has_a_dozen_options_and_three_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-h`; `--help` shows all."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["-h"])
    short = capsys.readouterr().out
    shown = [line.split()[0].rstrip(",") for line in short.splitlines() if line.startswith("  -")]
    assert len(shown) == len(help_text.MOST_USED) <= 13
    assert short.partition("examples:")[2].count("  grpo-run launch") == 3
    assert max(map(len, short.splitlines())) <= 80
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    everything = capsys.readouterr().out
    assert [
        name for action in build_parser()._actions for name in action.option_strings if name not in everything
    ] == []
