"""Options are a promise: none is removed, and every one of torchrun's is accepted. Their help."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_run.cli.launching.options import EXIT_CODES, MOST_USED, build_parser

OUR_FLAGS = {
    "--accelerate-config", "--accept-change", "--allow-degrade", "--deadline-ceiling",
    "--deadline-exit",
    "--deadline-first", "--deadline-floor", "--fresh", "--generation", "--guard", "--cleanup-every",
    "--inject",
    "--keep", "--log-completions", "--mask-capped", "--memory-plan", "--memory-trace", "--metrics-addr",
    "--heartbeat-url", "--no-preload", "--notify", "--on-end",
    "--repeat-rewards-above",
    "--on-resume-failure", "--require-resume", "--resume-from", "--reward-timeout", "--reward-workers",
    "--run-dir", "--run-id",
    "--show-ranks", "--snapshot-dir", "--snapshot-every", "--stop-timeout", "--strict-faults",
    "--tool-timeout",
    "--vote-timeout",
}  # fmt: skip
"""An option is a promise. Add a new one here and to the documentation."""


def torchruns() -> argparse.ArgumentParser:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every spelling of every option."""
    return {word for action in parser._actions for word in action.option_strings}


def test_our_options_are_a_promise() -> None:
    """An option is not removed or renamed."""
    assert flags(build_parser()) - flags(torchruns()) == OUR_FLAGS


def test_torchruns_options_mean_what_they_mean_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spellings, destination, number of values, choices and default, also with torchrun's variables."""
    ours = {"max_restarts", "nproc_per_node", "monitor_interval"}  # None marks one that was not given

    def told(parser: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
        return {
            action.dest: (
                set(action.option_strings), action.nargs, action.choices,
                action.default if action.dest not in ours
                or os.environ.get(f"PET_{action.dest.upper()}") else "ours",
            )
            for action in parser._actions
        }  # fmt: skip

    for value in (None, "1"):
        if value is not None:
            for name in told(torchruns()):
                monkeypatch.setenv(f"PET_{name.upper()}", value)
        made = told(build_parser())
        for name, expected in told(torchruns()).items():
            if name != "help":
                assert made[name] == expected, name


def test_help_and_wrong_words_are_answered_without_importing_torch(tmp_path: Path) -> None:
    """In a second, not in the seven that the libraries take."""
    cases = {
        "--help": 0, "--version": 0, "launch --help": 0, "launch --nproc-per-nod 2 x.py": 2,
        "launch --cleanup-every x x.py": 2, "launch": 2, "launch --inject help": 0,
    }  # fmt: skip
    code = (
        f"import sys\nfrom grpo_run.cli.main import main\nfor words, expected in {cases}.items():\n"
        "    try:\n        code = main(words.split())\n"
        "    except SystemExit as end:\n        code = end.code or 0\n"
        "    assert code == expected, (words, code)\n"
        "    assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules), words\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_every_option_has_a_help_text() -> None:
    """`--help` describes every option."""
    actions = [action for action in build_parser()._actions if action.option_strings]
    assert [action.option_strings for action in actions if not action.help] == []


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
    assert any(line.split()[:1] == [str(code)] for line in EXIT_CODES.splitlines())


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
    assert len(shown) == len(MOST_USED) <= 13
    assert short.partition("examples:")[2].count("  grpo-run launch") == 3
    assert max(map(len, short.splitlines())) <= 80
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    everything = capsys.readouterr().out
    assert [
        name for action in build_parser()._actions for name in action.option_strings if name not in everything
    ] == []
