"""Housekeeping after supervisors were killed: `gc` frees exactly what they left, and no run loses
anything.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest

from grpo_run.cli.main import main
from grpo_run.runtime.checkpoints.search import directories_of_run, find_checkpoints
from grpo_run.runtime.files import SHARED_MEMORY_ROOT

Captured = pytest.CaptureFixture[str]
STEPS = 16


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in memory and a registry of this test's own: `gc` must not touch the memory of other tests."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-run-test-", dir=SHARED_MEMORY_ROOT))
    monkeypatch.setattr("grpo_run.cli.removal.SHARED_MEMORY_ROOT", folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def areas(memory: Path) -> set[str]:
    """The staging areas that exist."""
    return {str(path) for path in memory.glob("grpo-run-*/*")}


def printed(capsys: Captured, *words: str, code: int = 0) -> dict[str, list[dict[str, object]]]:
    """Run a command and return the JSON that it prints."""
    assert main([*words, "--json"]) == code
    value: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return value


def paths(listed: list[dict[str, object]]) -> set[str]:
    """The paths in a list of `gc`."""
    return {str(one["path"]) for one in listed}


@pytest.mark.parametrize("killed", [2, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_gc_frees_exactly_what_killed_supervisors_left(
    killed: int, runs: Runs, memory: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The live run is not touched and ends with its weights; so does a killed one, which `resume` continues.

    A deleted run's memory is freed at once; that of the others is freed after its snapshots are on disk.
    """

    def launch(name: str) -> Run:
        return runs(
            "--snapshot-dir", str(memory), "--snapshot-every", "2", "--nproc-per-node", "2",
            str(SCRIPTS / "grpo.py"),
            "--output-dir", name, "--max-steps", str(STEPS), "--save-steps", "8", name=f"run-{name}",
        )  # fmt: skip

    dead = []
    for number in range(killed):
        run = launch(f"dead{number}")
        with run.held(after=3):
            run.start().until_step(3)
            run.process.kill()
            run.process.wait()
        dead.append(run)
    left = areas(memory)
    assert len(left) == killed
    shutil.rmtree(dead[0].directory)
    live = launch("live")
    with live.held(after=3):
        live.start().until_step(3)
        listed = printed(capsys, "gc", "--dry-run")
        assert paths(listed["would_free"]) == left
        assert paths(listed["kept"]) == areas(memory) - left
        freed = printed(capsys, "gc")
        assert (paths(freed["freed"]), freed["not_freed"]) == (left, [])
        assert areas(memory).isdisjoint(left)
        assert len(areas(memory)) == 1, "the memory of the live run"
        states = {run["run_id"]: run["state"] for run in printed(capsys, "ls")["runs"]}
        assert sorted(states.values()) == ["running", *["unknown"] * (killed - 1)]
    live.ended(timeout_seconds=600)
    assert digest(tmp_path / "live") == undisturbed("grpo.py", STEPS)

    status = dead[1].status()
    newest = next(find_checkpoints(*directories_of_run(status["run_id"], tmp_path / "dead1")))
    assert newest.manifest.step >= 2
    assert status["checkpoint"] == {"step": newest.manifest.step, "path": str(newest.path), "verified": True}
    again = runs(name="again")
    again.resume(dead[1].directory)
    again.ended()
    chosen = dead[1].events("resume_chosen")[-1]
    assert (chosen["step"], tmp_path / chosen["path"]) == (newest.manifest.step, newest.path), again.tail()
    assert digest(tmp_path / "dead1") == undisturbed("grpo.py", STEPS)
    assert areas(memory) == set()
    assert os.listdir(memory / f"grpo-run-{os.getuid()}") == []
