"""A feature is deleted with its folder and its word in `FEATURES`: the rest imports, type-checks, trains
through a kill and ends in the weights of an undisturbed run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

from grpo_run.runtime.features import FEATURES

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("cli", "dashboards", "grpo_run", "runtime", "trainers", "watchdog")
IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [file for file in root.rglob("*.py") if file.name not in ("__main__.py", "preload.py")]
names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]
for name in sorted(names):
    importlib.import_module(name)
from grpo_run.dashboards.metrics import metric
assert metric.__file__.startswith(sys.argv[1]), metric.__file__
labels = [label for label in vars(metric).values() if isinstance(label, metric.Label)]
words = {value for label in labels for value in label.values or ()}
print(len(names), *sorted(words & set(sys.argv[2:])))
"""
"""Imports every module of a copy but programs, and prints which of some words are labels of its metrics."""


def without(name: str, folder: Path) -> Path:
    """Copy the product without a feature; return the folder to put on Python's path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for file in listed:
        if file.startswith(f"runtime/features/{name}/") or not (REPOSITORY / file).is_file():
            continue
        copied = folder / (file if file.startswith("grpo_run/") else f"grpo_run/{file}")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / file, copied)
    table = folder / "grpo_run" / "runtime" / "features" / "__init__.py"
    text, removed = re.subn(rf'(FEATURES = \([^)]*?)"{name}",?\s*', r"\1", table.read_text())
    assert removed == 1
    table.write_text(text)
    return folder


def words_of(name: str) -> list[str]:
    """Return what a feature adds to the labels of metrics."""
    try:
        shown = __import__(f"grpo_run.runtime.features.{name}.shown", fromlist=["shown"])
    except ModuleNotFoundError:
        return []
    return [*getattr(shown, "ACTIONS", ()), *getattr(shown, "MASKING_REASONS", ())]


@pytest.mark.parametrize("name", FEATURES)
def test_the_rest_imports_and_has_nothing_of_a_deleted_feature(name: str, tmp_path: Path) -> None:
    """Its words are in no metric."""
    folder, words = without(name, tmp_path), words_of(name)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", IMPORT_ALL, str(folder), *words]
    done = subprocess.run(
        command, cwd="/", env=environment, check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    count, *left = done.stdout.split()
    assert int(count) > 300
    assert left == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(FEATURES)],
)
def test_a_run_without_a_feature_survives_a_kill(name: str, tmp_path: Path) -> None:
    """And ends in the weights of an undisturbed run."""
    folder = without(name, tmp_path / "copy")
    run = Run(
        tmp_path,
        ["--nproc-per-node", "2", "--inject", "kill@rank1:step4",
         str(SCRIPTS / "grpo.py"), "--max-steps", "6", "--output-dir", "out"],
        environment={"PYTHONPATH": str(folder)},
        program=(sys.executable, "-m", "grpo_run"),
        cold=True,
    )  # fmt: skip
    try:
        run.start().ended()
        files = {event["event"] for event in run.events()}
        assert len(run.events("incident")) == 1
        assert "run_ended" in files
    finally:
        run.close()
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 6)


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_the_rest_type_checks(name: str, tmp_path: Path) -> None:
    """As strictly as the whole."""
    folder = without(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(REPOSITORY / "pyproject.toml")],
        cwd=folder, env={**os.environ, "MYPYPATH": str(folder), "MYPY_CONFIG_FILE_DIR": str(folder)},
        check=False, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
