"""A feature is deleted with its folder and its word in `FEATURES`: the rest imports, type-checks, trains
through a kill and ends in the weights of an undisturbed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.feature_copies import REPOSITORY, copy_without
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

from grpo_run.runtime.features import FEATURES

NAMES = [feature.__name__.rpartition(".")[2] for feature in FEATURES]
IN_SHORT = ("memory_plan", "quarantine", "rollout_server")
"""Two that add labels to metrics, and the largest."""
IMPORT_ALL = """
import importlib, pathlib, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "grpo_run"]:
    del sys.modules[name]  # the warm launcher has imported them
sys.path.insert(0, sys.argv[1])
root = pathlib.Path(sys.argv[1])
files = [file for file in root.rglob("*.py") if file.name not in ("__main__.py", "preload.py")]
names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]
for name in sorted(names):
    importlib.import_module(name)
from grpo_run.dashboards.metrics import catalogue as listed
assert listed.__file__.startswith(sys.argv[1]), listed.__file__
words = {word for values in vars(listed).values() if isinstance(values, tuple) for word in values}
print(len(names), *sorted(words & set(sys.argv[2:])))
"""
"""Imports every module of a copy but programs, and prints which of some words are labels of its metrics."""


def words_of(name: str) -> list[str]:
    """Return what a feature adds to the labels of metrics."""
    try:
        shown = __import__(f"grpo_run.runtime.features.{name}.shown", fromlist=["shown"])
    except ModuleNotFoundError:
        return []
    return [*getattr(shown, "ACTIONS", ())]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.full) for name in NAMES]
)
def test_the_rest_imports_and_has_nothing_of_a_deleted_feature(name: str, tmp_path: Path) -> None:
    """Its words are in no metric."""
    folder, words = copy_without(name, tmp_path / "copy"), words_of(name)
    (tmp_path / "import_all.py").write_text(IMPORT_ALL)
    code, printed = warm.run(
        [sys.executable, "-P", str(tmp_path / "import_all.py"), str(folder), *words], cwd=tmp_path
    )
    assert code == 0, printed
    count, *left = printed.splitlines()[-1].split()
    assert int(count) > 300
    assert left == []


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_a_feature_survives_a_kill(name: str, tmp_path: Path) -> None:
    """And ends in the weights of an undisturbed run; `test_adding_a_feature.py` leaves out one feature."""
    folder = copy_without(name, tmp_path / "copy")
    run = Run(
        tmp_path,
        ["--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--max-steps", "6", "--output-dir", "out"],
        environment={"PYTHONPATH": str(folder)},
        program=(sys.executable, "-m", "grpo_run"),
        cold=True,
    )  # fmt: skip
    try:
        with run.held(4):
            run.start().until_step(3)
            run.kill(1)
            run.until_event("incident")
        run.ended()
        files = {event["event"] for event in run.events()}
        assert len(run.events("incident")) == 1
        assert "run_ended" in files
    finally:
        run.close()
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 6)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_rest_type_checks(name: str, tmp_path: Path) -> None:
    """As strictly as the whole."""
    folder = copy_without(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(REPOSITORY / "pyproject.toml")],
        cwd=folder, env={**os.environ, "MYPYPATH": str(folder), "MYPY_CONFIG_FILE_DIR": str(folder)},
        check=False, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
