"""What needs the package of an extra says what to install, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys

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
for name in {[*EXTRAS]}:
    sys.modules[name] = None
for name in {IMPORTED}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
