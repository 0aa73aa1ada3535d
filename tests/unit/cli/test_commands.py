"""`ls`, `rm`, `gc` and `resume` on run directories, without processes of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files
from support.identities import identity
from support.journal import event
from support.slots import fill, snapshot

from grpo_run.cli.main import main
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest, write_manifest
from grpo_run.runtime.history.checkpoint_backups import CheckpointBackups, find_backups
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import announce_target, register, registry_folder, targets_folder
from grpo_run.runtime.snapshots.ownership import describe_owner, write_owner
from grpo_run.runtime.snapshots.slot import StagingSlot

Captured = pytest.CaptureFixture[str]
MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Create a run that has committed step 7 of 9 and ended with a code; None for one that was killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    # other tests of this machine have areas in /dev/shm
    monkeypatch.setattr("grpo_run.cli.removal.SHARED_MEMORY_ROOT", here / "shm")

    def make(path: Path, code: int | None = None, **fields: Any) -> RunDirectory:
        run = RunDirectory(path=path)
        run.create()
        run.write_run({"run_id": path.name, **fields})
        journal = Journal(run.journal, path.name)
        journal.write(event("run_started"))
        call = {"train_call": 1, "trainer_class": "GRPOTrainer", "output_dir": str(here / "out")}
        journal.write(event("train_started", rank=0, step=0, target_steps=9, **call))
        journal.write(event("step_committed", step=7, train_call=1))
        journal.write(
            event("checkpoint_published", step=5, train_call=1, path=str(here / "out" / "checkpoint-5"))
        )
        if code is not None:
            journal.write(event("run_ended", exit_code=code, sentence=""))
        return run

    return make


def make_area(run: RunDirectory, here: Path) -> Path:
    """Create the area that the run's `run.json` names."""
    area = here / "shm" / f"grpo-run-{os.getuid()}" / "0123456789abcdef"
    area.mkdir(parents=True, mode=0o700)
    area.parent.chmod(0o700)
    (area / "slot0").mkdir()
    (area / "slot0" / "model.safetensors").write_bytes(b"x" * 8192)
    write_owner(area, describe_owner(run.path.name, run.path))
    run.write_run({**run.read_run(), "snapshot_directory": str(area)})
    return area


def output_of(capsys: Captured, *words: str, code: int = 0) -> str:
    """Run a command and return what it prints."""
    assert main(words) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_ls_lists_all_runs(make_run: MakeRun, here: Path, tmp_path: Path, capsys: Captured) -> None:
    """Those in runs/ and those elsewhere, with states; none twice, none that is gone."""
    make_run(here / "runs" / "night", 75)
    make_run(here / "runs" / "day", 0)
    elsewhere = make_run(here / "elsewhere" / "evening")
    for path in (elsewhere.path, here / "runs" / "night", here / "gone"):
        register(path, registry_folder())
    runs = json.loads(output_of(capsys, "ls", "--json"))["runs"]
    assert {run["run_id"]: run["state"] for run in runs} == {
        "night": "stopped", "day": "finished", "evening": "unknown",
    }  # fmt: skip
    assert len(runs) == 3
    lines = output_of(capsys, "ls").splitlines()
    assert lines[0].split() == ["run", "state", "step", "age", "size", "memory", "directory"]
    assert any(line.startswith("night") and "7 of 9" in line and "runs/night" in line for line in lines)


def test_a_damaged_run_is_listed(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """One of them must not hide the others."""
    make_run(here / "runs" / "night", 0)
    (here / "runs" / "broken").mkdir()
    (here / "runs" / "broken" / "run.json").write_text("{")
    assert "unreadable" in output_of(capsys, "ls")


def test_without_runs_ls_says_so(make_run: MakeRun, capsys: Captured) -> None:
    """Exit code 0."""
    assert "no runs" in output_of(capsys, "ls")
    assert "nothing to free" in output_of(capsys, "gc")


def test_a_registered_run_is_found_by_its_id(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """By all commands that take a run."""
    register(make_run(here / "elsewhere" / "evening", 75).path, registry_folder())
    assert "Stopped at step 7 of 9" in output_of(capsys, "status", "evening")
    register(make_run(here / "other" / "evening", 75).path, registry_folder())
    assert "several runs" in output_of(capsys, "status", "evening", code=2)


def test_rm_deletes_a_run_and_leaves_checkpoints(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """Its memory too, and its entry in the registry."""
    run = make_run(here / "runs" / "night", 0)
    register(run.path, registry_folder())
    area = make_area(run, here)
    (here / "out" / "checkpoint-5").mkdir(parents=True)
    assert "deleted runs/night" in output_of(capsys, "rm", "night")
    assert not run.path.exists()
    assert not area.exists()
    assert (here / "out" / "checkpoint-5").is_dir()
    folder = registry_folder()
    assert folder is not None
    assert list(folder.iterdir()) == []


def test_rm_leaves_files_of_the_user(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """`--run-dir` may have named a directory with other things in it, such as checkpoints."""
    run = make_run(here / "out", 0)
    (run.path / "checkpoint-5").mkdir()
    assert "checkpoint-5" in output_of(capsys, "rm", "out")
    assert [path.name for path in run.path.iterdir()] == ["checkpoint-5"]


def test_rm_refuses_a_live_run_before_it_deletes_another(
    make_run: MakeRun, here: Path, capsys: Captured
) -> None:
    """Exit code 2; nothing is deleted."""
    done, live = make_run(here / "runs" / "done", 0), make_run(here / "runs" / "live")
    lock = live.acquire()
    assert "is live" in output_of(capsys, "rm", "done", "live", code=2)
    os.close(lock)
    assert done.run_json.exists()
    assert live.run_json.exists()


@pytest.mark.parametrize("code", [None, 0, 93])
def test_rm_refuses_a_run_whose_newest_state_is_in_memory(
    make_run: MakeRun, here: Path, capsys: Captured, code: int | None
) -> None:
    """Unless it is forced to; however the run has ended."""
    run = make_run(here / "runs" / "night", code)
    area = make_area(run, here)
    (area / "slot0" / "STAGED.json").write_text("{}")
    assert "only in memory" in output_of(capsys, "rm", "night", code=2)
    output_of(capsys, "rm", "night", "--force")
    assert not run.path.exists()
    assert not area.exists()


def test_gc_frees_what_dry_run_lists(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """Memory of a deleted run, renamed checkpoints and an old run; a live run keeps all of it."""
    dead = make_run(here / "runs" / "dead", 75)
    area = make_area(dead, here)
    for file in sorted(dead.path.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    dead.path.rmdir()
    make_run(here / "runs" / "old", 0)
    names = ("checkpoint-5", "replaced-checkpoint-5", "replaced-checkpoint-5.2", "rejected-checkpoint-3")
    for name in names:
        (here / "out" / name).mkdir(parents=True)
        (here / "out" / name / "file").write_bytes(b"x" * 100)
    listed = json.loads(output_of(capsys, "gc", "--dry-run", "--days", "0", "--json"))
    paths = {Path(one["path"]).name for one in listed["would_free"]}
    assert paths == {area.name, "old", *names[1:]}
    assert area.exists()
    freed = json.loads(output_of(capsys, "gc", "--days", "0", "--json"))
    assert freed["freed"] == listed["would_free"]
    assert (freed["bytes"], freed["not_freed"]) == (listed["bytes"], [])
    assert not area.exists()
    assert [path.name for path in (here / "out").iterdir()] == ["checkpoint-5"]
    assert not (here / "runs" / "old").exists()
    assert "nothing to free" in output_of(capsys, "gc", "--days", "0")


def test_gc_leaves_output_directories_of_live_runs(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """Even where a dead run has written to the same one."""
    make_run(here / "runs" / "dead", 0)
    live = make_run(here / "runs" / "live")
    area = make_area(live, here)
    (here / "out" / "replaced-checkpoint-5").mkdir(parents=True)
    lock = live.acquire()
    assert f"kept {area}" in output_of(capsys, "gc")
    os.close(lock)
    assert (here / "out" / "replaced-checkpoint-5").exists()
    assert area.exists()


def test_gc_names_the_only_copy_of_a_checkpoint_that_goes_with_a_deleted_run(
    make_run: MakeRun, here: Path, capsys: Captured
) -> None:
    """One that is on disk is not named."""
    run = make_run(here / "runs" / "night")
    area = make_area(run, here)
    for index, step in enumerate((4, 8)):
        slot = StagingSlot(index, area / f"slot{index}")
        slot.path.mkdir(exist_ok=True)
        fill(slot, snapshot(here / "out", step))
    slot.mark_drained()
    shutil.rmtree(run.path)
    shown = output_of(capsys, "gc")
    assert f"it has the only copy of {here}/out/checkpoint-4" in shown
    assert "checkpoint-8" not in shown
    assert not area.exists()


def test_gc_frees_memory_of_a_killed_run_that_holds_no_snapshot(
    make_run: MakeRun, here: Path, capsys: Captured
) -> None:
    """There is nothing to write first; the run directory stays."""
    run = make_run(here / "runs" / "night")
    area = make_area(run, here)
    assert "would free" in output_of(capsys, "gc", "--dry-run")
    assert "freed" in output_of(capsys, "gc")
    assert not area.exists()
    assert run.run_json.exists()


def hold_checkpoint(run: RunDirectory, here: Path, *, beside: bool) -> Path:
    """Hold checkpoint-5 of the run, as its supervisor was doing when it was killed; return the links."""
    checkpoint = checkpoint_files.plain(here / "out", 5)
    write_manifest(checkpoint, identity(here / "out", 5, run_id=run.path.name))
    if beside:
        run.checkpoint_backups.touch()  # as if no directory could be made there
    calls = History.of(read_journal(run.journal)).calls
    CheckpointBackups(run.checkpoint_backups, run.path.name, calls, warn=print).make()
    if beside:
        run.checkpoint_backups.unlink()
    (links,) = find_backups(run.checkpoint_backups, run.path.name, [str(here / "out")])
    assert (links.path.parent == here) == beside
    return links.path


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_gc_removes_the_links_of_a_killed_start(
    make_run: MakeRun, here: Path, capsys: Captured, cleared: bool, beside: bool
) -> None:
    """The checkpoint is put back if they are all that is left of it; `ls` counts them then."""
    run = make_run(here / "runs" / "night")
    links = hold_checkpoint(run, here, beside=beside)
    (entry,) = json.loads(output_of(capsys, "ls", "--json"))["runs"]
    if cleared:
        shutil.rmtree(here / "out")
    (after,) = json.loads(output_of(capsys, "ls", "--json"))["runs"]
    assert (after["size_bytes"] > entry["size_bytes"]) == cleared
    (listed,) = json.loads(output_of(capsys, "gc", "--dry-run", "--json"))["would_free"]
    assert (listed["kind"], Path(listed["path"]).resolve()) == ("backup", links)
    assert ("checkpoint-5" in listed["what"]) == cleared
    assert links.is_dir()
    (freed,) = json.loads(output_of(capsys, "gc", "--json"))["freed"]
    assert freed == listed
    assert not links.exists()
    assert not run.checkpoint_backups.exists()
    verify_digests(here / "out" / "checkpoint-5", read_manifest(here / "out" / "checkpoint-5").files)
    assert os.listdir(here / "out") == ["checkpoint-5"]
    assert "nothing to free" in output_of(capsys, "gc")


def test_gc_leaves_the_links_of_a_live_run(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """Its script may be about to clear the directory."""
    run = make_run(here / "runs" / "night")
    links = hold_checkpoint(run, here, beside=False)
    lock = run.acquire()
    assert "nothing to free" in output_of(capsys, "gc")
    os.close(lock)
    assert links.is_dir()


@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_rm_removes_links_but_not_the_last_copy_of_a_checkpoint(
    make_run: MakeRun, here: Path, capsys: Captured, beside: bool
) -> None:
    """Checkpoints stay, so that one is refused unless it is forced."""
    run = make_run(here / "runs" / "night")
    (run.processes).write_text("{}")
    links = hold_checkpoint(run, here, beside=beside)
    (here / "out").rename(here / "elsewhere")
    assert "checkpoint-5" in output_of(capsys, "rm", "night", code=2)
    assert links.is_dir()
    (here / "elsewhere").rename(here / "out")
    assert "deleted runs/night\n" in output_of(capsys, "rm", "night")
    assert not links.exists()
    assert not run.path.exists()
    assert (here / "out" / "checkpoint-5" / "model.safetensors").is_file()


def test_resume_shows_the_command_of_the_run(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """In its directory, with its variables, without the option that would start another run."""
    inputs = {"files": {}, "variables": {"SEED": "2"}, "environment": {}, "settings": {}, "versions": {}}
    typed = ["--fresh", "--run-id", "night", "--nproc-per-node=2", "--max-restarts", "5", "train.py"]
    typed += ["--fresh", "a b"]
    run = make_run(here / "runs" / "night", 75, typed=typed, inputs=inputs, working_directory=str(here))
    shown = output_of(capsys, "resume", "night", "--dry-run", "--accept-change")
    command = (
        f"--run-dir {run.path.resolve()} --accept-change --nproc-per-node=2 --max-restarts 5 train.py --fresh"
        " 'a b'"
    )
    assert shown == f"grpo-run: in {here}: SEED=2 grpo-run launch {command}\n"


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_resume_leaves_out_an_address_that_was_not_recorded(
    make_run: MakeRun, here: Path, capsys: Captured, form: str
) -> None:
    """It says so; an address in a file is kept. The script's own arguments stay as they are."""
    url = "https://hooks.example.org/..."
    words = f"{form.format('--notify', url)} {form.format('--heartbeat-url', 'file')} train.py --notify {url}"
    make_run(here / "runs" / "night", 75, typed=words.split(), working_directory=str(here))
    warning, shown = output_of(capsys, "resume", "night", "--dry-run").splitlines()
    assert "warning: continuing without --notify" in warning
    assert shown.endswith(f" {form.format('--heartbeat-url', 'file')} train.py --notify {url}")


def test_resume_refuses_a_directory_that_is_gone(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """One line that says so."""
    make_run(here / "runs" / "night", 75, typed=["train.py"], working_directory="/nonexistent/place")
    shown = output_of(capsys, "resume", "night", code=2)
    assert "does not exist any more" in shown
    assert shown.count("\n") == 1


def test_resume_refuses_a_live_run(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """It has nothing to resume."""
    run = make_run(here / "runs" / "night", typed=["train.py"], working_directory=str(here))
    lock = run.acquire()
    assert "is running" in output_of(capsys, "resume", "night", code=2)
    os.close(lock)


def test_gc_removes_the_addresses_of_killed_launches(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """Also of a run that somebody has deleted by hand; a live run keeps its address."""
    killed, live, deleted = (make_run(here / "runs" / name) for name in ("killed", "live", "deleted"))
    for port, run in enumerate((killed, live, deleted)):
        register(run.path, registry_folder())
        announce_target(run.path, targets_folder(), target=f"127.0.0.1:{port}", run_id=run.path.name)
    lock = live.acquire()
    shutil.rmtree(deleted.path)
    (freed, also) = json.loads(output_of(capsys, "gc", "--json"))["freed"]
    assert {one["kind"] for one in (freed, also)} == {"target"}
    folder = targets_folder()
    assert folder is not None
    (left,) = folder.iterdir()
    assert "127.0.0.1:1" in left.read_text()
    os.close(lock)
    assert "is not live" in output_of(capsys, "gc")
    assert not list(folder.iterdir())


def test_gc_keeps_memory_of_a_folder_that_may_be_unmounted(
    make_run: MakeRun, here: Path, capsys: Captured
) -> None:
    """Until the user says that all disks are mounted."""
    run = make_run(here / "project" / "runs" / "night")
    area = make_area(run, here)
    shutil.rmtree(here / "project")
    shown = output_of(capsys, "gc")
    assert "not mounted" in shown
    assert "--disks-mounted" in shown
    assert area.exists()
    assert "would free" in output_of(capsys, "gc", "--dry-run", "--disks-mounted")
    output_of(capsys, "gc", "--disks-mounted")
    assert not area.exists()
