"""A fresh interpreter starts without any package of an extra, and makes what every other process makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import warm

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
START = f"""
import importlib, sys
for name in {[*EXTRAS]}:
    sys.modules[name] = None
for name in {IMPORTED}:
    importlib.import_module(name)
"""
LEARN = """
import pathlib
from grpo_run.trainers.recipes.tiny import learned_tokenizer
texts = [f'Ann has {count} apples, and £{count * 7} in “her” bag.\\n#### {count * 8}' for count in range(200)]
pathlib.Path("learned").write_text(learned_tokenizer(texts).backend_tokenizer.to_str())
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an interpreter has learned that could not import these packages."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "fresh.py").write_text(START + LEARN)
    code, printed = warm.run([sys.executable, "-P", str(folder / "fresh.py")], cwd=folder, cold=True)
    assert code == 0, printed
    return (folder / "learned").read_text()


def test_starting_needs_no_package_of_an_extra(learned: str) -> None:
    """In an interpreter in which none of them can be imported."""
    assert learned


def test_another_process_learns_the_same_tokenizer(learned: str, tmp_path: Path) -> None:
    """Every rank builds it, also after a restart, with other seeds of its hash tables."""
    (tmp_path / "learn.py").write_text(LEARN)
    code, printed = warm.run([sys.executable, "-P", str(tmp_path / "learn.py")], cwd=tmp_path)
    assert code == 0, printed
    assert (tmp_path / "learned").read_text() == learned
