"""Options are a promise: none is removed, every one of torchrun's is accepted, and each has a help text."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_run.cli.launching.options import build_parser

OUR_FLAGS = {
    "--accelerate-config", "--accept-change", "--allow-degrade", "--deadline-ceiling",
    "--deadline-exit",
    "--deadline-first", "--deadline-floor", "--fresh", "--generation", "--guard", "--cleanup-every",
    "--inject",
    "--keep", "--log-completions", "--mask-capped", "--memory-plan", "--memory-trace", "--metrics-addr",
    "--no-memory-forecast", "--preflight",
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


def test_every_option_of_torchrun_is_accepted() -> None:
    """`grpo-run launch` can replace `torchrun` in any command."""
    assert flags(torchruns()) <= flags(build_parser())


def test_torchruns_options_mean_what_they_mean_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destination, number of values, choices and default, also with torchrun's variables."""
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
