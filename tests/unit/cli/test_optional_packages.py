"""What needs the package of an extra says what to install, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.upstream.versions import EXTRAS

IMPORTED = (
    "grpo_run.cli.launch", "grpo_run.cli.resume", "grpo_run.cli.train", "grpo_run.cli.plan",
    "grpo_run.cli.top", "grpo_run.cli.serve", "grpo_run.cli.demo",
    "grpo_run.cli.report",
    "grpo_run.runtime.supervisor.supervisor", "grpo_run.runtime.snapshots._drain_worker",
    "grpo_run.runtime.rank.hooks.train_call", "grpo_run.runtime.rank.loops.steps",
    "grpo_run.trainers.recipes.training",
)  # fmt: skip
"""What the command line, the supervisor, ranks and a recipe import when they start."""


def test_starting_needs_no_package_of_an_extra() -> None:
    """In an interpreter in which none of them can be imported."""
    code = f"""
import importlib, sys
for name in {[*EXTRAS, "trackio"]}:  # which needs uvicorn, and TRL imports if it is there
    sys.modules[name] = None
for name in {IMPORTED}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("uvicorn", ["serve"], "grpo-run serve needs uvicorn: pip install 'grpo-run[pages]'"),
        ("starlette", ["serve"], "grpo-run serve needs starlette: pip install 'grpo-run[pages]'"),
        ("textual", ["top", "run"], "grpo-run top needs textual: pip install 'grpo-run[pages]'"),
        (
            "peft",
            ["train", "memgen-arithmetic"],
            "the recipe memgen-arithmetic needs peft: pip install 'grpo-run[peft]'",
        ),
        (
            "deepspeed",
            ["launch", "--accelerate-config", "zero2.yaml", "train.py"],
            "distributed_type DEEPSPEED needs deepspeed: pip install 'grpo-run[deepspeed]'",
        ),
    ],
)
def test_a_command_says_what_to_install(
    module: str,
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, with exit code 2, before anything is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "zero2.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"
    )
    monkeypatch.setitem(sys.modules, module, None)
    assert main(words) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
