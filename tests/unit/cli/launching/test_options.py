"""Every option of torchrun's is accepted. Ours are in the help; see `../stories/launch_help.txt`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_run.cli.launching.options import build_parser


def torchruns() -> argparse.ArgumentParser:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


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
