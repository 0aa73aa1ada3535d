"""An attempt that has lost touch changes no checkpoint once a newer attempt has begun, whenever that is.

A newer attempt begins before the k-th operation on the file system of an older one, for every k. It trains
on, publishes the same step with other weights, and what the older one does after that changes nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.identities import identity

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import mark_finished, mark_kept, write_manifest
from grpo_run.runtime.checkpoints.publishing import (
    begin_attempt,
    clean_partial_directories,
    partial_directory,
    publish,
    reject_checkpoint,
)
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.checkpoints.search import find_checkpoints, snapshot_places
from grpo_run.runtime.errors import CheckpointError, SupersededError

RUN = "run-1"
OPERATIONS = ("rename", "replace", "mkdir", "rmdir", "unlink", "open", "listdir", "scandir", "stat", "lstat")


def attempt(output: Path) -> Path:
    """Begin an attempt, and return its fence."""
    fence = fencing.prepare(output, RUN)
    begin_attempt(fence, output, RUN)
    return fence


def save(directory: Path, step: int, fence: Path | None, content: bytes, *, scheduled: bool = True) -> Path:
    """Write and publish a checkpoint as the drain worker does."""
    name = f"checkpoint-{step}" if scheduled else f"snapshot-{step}"
    with partial_directory(directory, step) as partial:
        fill(partial, step, content, scheduled=scheduled)
        publish(partial, directory / name, fence=fence)
    return directory / name


def fill(path: Path, step: int, content: bytes, *, scheduled: bool = True) -> None:
    """Write a complete checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    write_manifest(path, identity(run_id=RUN, step=step, scheduled=scheduled))


def weights(output: Path) -> dict[str, bytes]:
    """Verify the checkpoints and snapshots in a directory, and return their weights by name."""
    found = {}
    for one in find_checkpoints(output, *snapshot_places(output, RUN, 1)):
        verify_digests(one.path, one.manifest.files)
        found[one.path.name] = (one.path / "model.safetensors").read_bytes()
    return found


class Interrupted:
    """Runs an attempt's operation, and something else before the k-th call of the file system in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.then: Callable[[], None] = lambda: None
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    self.then()
            return original(*args, **kwargs)

        return call

    def run(self, k: int, operation: Callable[[], object], then: Callable[[], None]) -> bool:
        """Return whether the operation was interrupted. Its refusal is no error."""
        self.left, self.then = k, then
        try:
            operation()
        except (SupersededError, CheckpointError, OSError):
            assert self.left is None, "refused although no newer attempt has begun"
        happened, self.left = self.left is None, None
        return happened


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    """Interrupts operations."""
    return Interrupted(monkeypatch)


NAMES = ("publish", "replace", "keep", "reject", "finish", "want", "clean", "rotate")


@pytest.mark.parametrize(
    ("inside", "apart"),
    [(True, 3), *(pytest.param(inside, 1, marks=pytest.mark.full) for inside in (True, False))],
)
@pytest.mark.parametrize("scheduled", [True, False], ids=["checkpoint", "snapshot"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes_after_a_newer_attempt_has_begun(
    tmp_path: Path, interrupted: Interrupted, name: str, scheduled: bool, inside: bool, apart: int
) -> None:
    """What the newer attempt publishes is untouched, nothing older is published, and nothing is lost.

    Checkpoints and snapshots are interrupted before different operations where not all are tried.
    """
    for k in range(apart // 2 if scheduled else 0, 1000, apart):
        output = tmp_path / f"{k}" / "out"
        output.mkdir(parents=True)
        if inside:
            (output / "README.md").touch()
        case = Case(output, name, scheduled=scheduled)
        if not interrupted.run(k, case.operation, case.begin_newer):
            assert k > 2, "nothing was interrupted"
            return
        case.check()
        shutil.rmtree(output.parent)
    pytest.fail("it does not end")


class Case:
    """One operation of an older attempt on the checkpoint of step 8."""

    def __init__(self, output: Path, name: str, *, scheduled: bool) -> None:
        self.output, self.name, self.scheduled = output, name, scheduled
        self.older = attempt(output)
        self.place = output if scheduled else snapshot_places(output, RUN, 1)[0]
        self.kind = "checkpoint" if scheduled else "snapshot"
        self.path = self.place / f"{self.kind}-8"
        if name != "publish":
            for step in (4, 8):
                self.save(step, self.older, b"first")
        if name == "keep":
            write_manifest(self.path, identity(run_id="run-0", step=8, scheduled=scheduled))
        self.before = weights(output)
        if name == "clean":
            os.rename(self.path, self.place / f".{self.kind}-8.replaced-1f3a")

    def save(self, step: int, fence: Path, content: bytes) -> None:
        save(self.place, step, fence, content, scheduled=self.scheduled)

    def operation(self) -> None:
        """What is interrupted."""
        if self.name in ("publish", "replace", "keep"):
            self.save(8, self.older, b"older")
        elif self.name == "reject":
            reject_checkpoint(self.path, "bad", fence=self.older)
        elif self.name == "finish":
            mark_finished(self.path, fence=self.older)
        elif self.name == "want":
            mark_kept(self.path, fence=self.older)
        elif self.name == "clean":
            clean_partial_directories(self.place, fence=self.older)
        else:
            rotate(self.output, newest=self.path, limit=1, best=None, fence=self.older)

    def begin_newer(self) -> None:
        """A newer attempt begins, and does the same step again."""
        self.newer = attempt(self.output)
        for place in (self.output, self.place):
            clean_partial_directories(place, fence=self.newer)
        self.found = weights(self.output)
        self.rejected = list(self.place.glob("rejected-*"))
        for step in (8, 12):
            self.save(step, self.newer, b"newer")
        self.published = {one: self._files(one) for one in self.place.glob(f"{self.kind}-*")}

    def _files(self, path: Path) -> dict[str, bytes]:
        return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}

    def check(self) -> None:
        """Compare with what the newer attempt has found and left."""
        if self.name == "rotate":
            assert self.path.name in self.found
        elif self.name == "reject":
            assert (self.path.name in self.found) != bool(self.rejected)
        else:
            assert set(self.before) <= set(self.found)
        with pytest.raises(SupersededError, match=f"begun on other hosts; {self.kind}-16 is not published"):
            self.save(16, self.older, b"late")
        assert rotate(self.output, newest=self.path, limit=1, best=None, fence=self.older) == []
        assert reject_checkpoint(self.path, "bad", fence=self.older) is None
        assert {one: self._files(one) for one in self.place.glob(f"{self.kind}-*")} == self.published
        assert weights(self.output)[self.path.name] == b"newer"
        fencing.close(self.older)
        fencing.close(self.newer)
        left = {name for name in os.listdir(self.output) if not name.startswith(("checkpoint-", "README"))}
        assert left <= ({"_grpo_run", f"rejected-{self.path.name}", f"replaced-{self.path.name}"})
        assert not fencing.exists(self.output, RUN)


def test_of_two_attempts_that_begin_at_once_one_remains(tmp_path: Path, interrupted: Interrupted) -> None:
    """Whenever the second one begins; what the first one has ended is not lost."""
    for k in range(1000):
        output = tmp_path / f"{k}" / "out"
        first = attempt(output)
        save(output, 8, first, b"first")
        os.rename(output / "checkpoint-8", fencing.place_in(first, output / "checkpoint-8"))
        began: list[Path] = []

        def begin(output: Path = output, began: list[Path] = began) -> None:
            began.append(attempt(output))

        if not interrupted.run(k, begin, begin):
            assert k > 10
            return
        alive = [fence for fence in began if fence.exists()]
        assert len(alive) == 1
        assert weights(output) == {"checkpoint-8": b"first"}
        fencing.close(alive[0])
        assert os.listdir(output.parent) == ["out"]
        assert os.listdir(output) == ["checkpoint-8"]
    pytest.fail("it does not end")


def test_an_attempt_that_was_killed_in_the_middle_loses_nothing(
    tmp_path: Path, interrupted: Interrupted
) -> None:
    """Also if the one that restores is killed; a run on one host restores and ends it too."""

    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    for k in range(1000):
        output = tmp_path / f"{k}" / "out"
        first = attempt(output)
        save(output, 8, first, b"first")
        os.rename(output / "checkpoint-8", fencing.place_in(first, output / "checkpoint-8"))
        try:
            happened = interrupted.run(k, lambda output=output: attempt(output), die)  # type: ignore[misc]
        except Killed:
            happened = True
        last = attempt(output)
        assert weights(output) == {"checkpoint-8": b"first"}
        fencing.close(last)
        assert os.listdir(output) == ["checkpoint-8"]
        if not happened:
            assert k > 10
            return
    pytest.fail("it does not end")


def test_a_name_is_never_used_again(tmp_path: Path) -> None:
    """An attempt that comes back after all others have ended changes nothing of a later one."""
    older = attempt(tmp_path / "out")
    save(tmp_path / "out", 4, older, b"4")
    newer = attempt(tmp_path / "out")
    fencing.close(newer)
    latest = attempt(tmp_path / "out")
    assert latest.parent.name == older.parent.name == ".attempt-1"
    with pytest.raises(SupersededError):
        save(tmp_path / "out", 4, older, b"late")
    assert weights(tmp_path / "out") == {"checkpoint-4": b"4"}


def test_a_fence_that_cannot_reach_the_directory_is_not_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a quota of its own: `rename` fails although both are on one disk."""
    output = tmp_path / "out"
    assert fencing.prepare(output, RUN).is_relative_to(tmp_path / "out_grpo_run")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if (tmp_path / "out_grpo_run" in Path(source).parents) != (
            tmp_path / "out_grpo_run" in Path(target).parents
        ):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    assert fencing.prepare(output, RUN).is_relative_to(output)


def test_supervisor_and_drain_worker_find_the_fence(tmp_path: Path) -> None:
    """By the output directory; the one who has made it removes it at the end."""
    run, output = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    assert fencing.recorded(run, output) is None
    fence = attempt(output)
    fencing.record(run, output, fence, made=False)
    assert fencing.recorded(run, tmp_path / "run" / ".." / "out") == fence
    fencing.close_recorded(run, tmp_path / "missing")
    assert fence.exists()  # another host has made it
    assert fencing.recorded(run, output) is None
    memory = tmp_path / "memory"
    memory.mkdir()
    for folder in (run, memory):
        fencing.record(folder, output, fence, made=True)
    fencing.close_recorded(run, memory)
    assert fence.exists()  # a snapshot is only in memory
    shutil.rmtree(memory)
    fencing.close_recorded(run, memory)
    assert os.listdir(tmp_path / "out") == []
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    assert os.listdir(run) == []


def test_a_host_knows_that_an_attempt_has_begun_without_it(tmp_path: Path) -> None:
    """Its fence is gone; what it has in memory from before is refused from then on."""
    run, output = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    assert not fencing.was_left_out(run, output)
    fence = attempt(output)
    fencing.record(run, output, fence, made=True)
    assert not fencing.was_left_out(run, output)
    assert fencing.refused_before(run, output) == 0
    newer = attempt(output)
    assert fencing.was_left_out(run, output)
    fencing.record(run, output, newer, made=False, refused_before=3)
    assert not fencing.was_left_out(run, output)
    fencing.record(run, output, attempt(output), made=False)
    assert fencing.refused_before(run, output) == 3
