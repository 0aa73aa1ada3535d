"""Three slots: which one is written next, who holds it, and what is taken for a snapshot."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slots import fill, snapshot

from grpo_run.runtime import files
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.area import SLOTS, StagingArea, staging_path
from grpo_run.runtime.staging.slot import DRAINED, STAGED, StagingSlot

OUT = Path("/out")


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    """Three empty slots."""
    return StagingArea(tmp_path / "run")


@contextmanager
def held(slot: StagingSlot) -> Iterator[None]:
    """Somebody else holds the slot, through a descriptor of their own."""
    descriptor = os.open(slot.path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def test_only_the_user_may_look_into_it(staging: StagingArea) -> None:
    """Weights and prompts lie there."""
    for path in (staging.path, *(slot.path for slot in staging.slots)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    staging.slots[0].begin_snapshot()
    staging.slots[0].complete_snapshot(snapshot(OUT))
    staging.slots[0].mark_drained()
    assert stat.S_IMODE(staging.slots[0].files.stat().st_mode) == 0o700
    for name in (STAGED, DRAINED):
        assert stat.S_IMODE((staging.slots[0].path / name).stat().st_mode) == 0o600


def test_what_was_declared_is_read(staging: StagingArea) -> None:
    """All of it; also by who opens the directory later."""
    staged = snapshot(OUT, 7, limit=2, best="checkpoint-3", scheduled=False)
    slot = staging.slots[1]
    slot.begin_snapshot()
    assert slot.read_snapshot() is None
    slot.complete_snapshot(staged)
    assert slot.read_snapshot() == staged
    assert StagingArea(staging.path).snapshots() == [(staged, slot)]


def test_what_is_being_written_is_no_snapshot(staging: StagingArea) -> None:
    """Nor drained; and its files are gone."""
    slot = staging.slots[0]
    fill(slot, snapshot(OUT, 5))
    slot.mark_drained()
    assert slot.drained
    assert staging.snapshots()
    slot.begin_snapshot()
    assert slot.read_snapshot() is None
    assert not slot.drained
    assert staging.snapshots() == []
    assert list(slot.files.iterdir()) == []


def test_a_slot_written_again_is_read_again(staging: StagingArea) -> None:
    """What was read before is not kept for the new content."""
    slot = staging.slots[0]
    for step in (5, 6):
        slot.begin_snapshot()
        slot.complete_snapshot(snapshot(OUT, step))
        assert [staged.step for staged, _ in staging.snapshots()] == [step]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"step": 5}, {"step": 6}),
        ({"step": 9, "ordinal": 1}, {"step": 2, "ordinal": 2}),
        ({"step": 9, "attempt": 0}, {"step": 2, "attempt": 1}),
        ({"step": 9, "attempt": 0, "ordinal": 2}, {"step": 2, "attempt": 1, "ordinal": 1}),
        ({"step": 9, "staged_at": 1.0}, {"step": 9, "staged_at": 2.0}),
    ],
)
def test_the_newest_comes_first(staging: StagingArea, older: dict[str, Any], newer: dict[str, Any]) -> None:
    """By attempt, call, step and time: an attempt that goes back stages earlier steps, and calls, again."""
    fill(staging.slots[0], snapshot(OUT, **newer))
    fill(staging.slots[1], snapshot(OUT, **older))
    assert [slot.index for _, slot in staging.snapshots()] == [0, 1]


VALID = json.loads(snapshot(OUT).model_dump_json())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        json.dumps(VALID | {"step": "many"}).encode(),
        json.dumps(VALID | {"train_call": None}).encode(),
        json.dumps(VALID | {"schema_version": 2}).encode(),
        json.dumps(VALID).encode()[:-20],
    ],
)
def test_what_cannot_be_read_is_no_snapshot(staging: StagingArea, content: bytes) -> None:
    """It is named to who asks for it, passed over otherwise, and the slot is there to be written again."""
    slot = staging.slots[0]
    (slot.path / STAGED).write_bytes(content)
    with pytest.raises(CheckpointError, match=STAGED):
        slot.read_snapshot()
    assert staging.snapshots() == []
    assert staging.choose_slot() == slot


def test_a_folder_in_the_place_of_the_file_is_no_snapshot(staging: StagingArea) -> None:
    """Nothing raises."""
    (staging.slots[0].path / STAGED).mkdir()
    assert staging.slots[0].read_snapshot() is None
    assert staging.snapshots() == []


def test_unknown_fields_are_let_pass(staging: StagingArea) -> None:
    """A later release may say more."""
    (staging.slots[0].path / STAGED).write_text(json.dumps(VALID | {"more": 1}))
    assert staging.slots[0].read_snapshot() == snapshot(OUT)


# ---- which slot is next ----


def test_drained_first_then_superseded_then_empty(staging: StagingArea) -> None:
    """Memory that is there already is used again before more is taken."""
    first, second, third = staging.slots
    assert staging.choose_slot() == first
    fill(first, snapshot(OUT, 1, scheduled=False))
    assert staging.choose_slot() == second
    fill(second, snapshot(OUT, 2, scheduled=False))
    assert staging.choose_slot() == first
    second.mark_drained()
    assert staging.choose_slot() == second
    with held(second):
        assert staging.choose_slot() == first
        with held(first):
            assert staging.choose_slot() == third
            with held(third):
                assert staging.choose_slot() is None


def test_what_the_script_asked_for_waits_for_the_disk(staging: StagingArea) -> None:
    """Unless told otherwise, and then the oldest goes; the newest never does."""
    for step, slot in enumerate(staging.slots):
        fill(slot, snapshot(OUT, step))
    assert staging.choose_slot() is None
    assert staging.choose_slot(sacrifice=True) == staging.slots[0]
    with held(staging.slots[0]):
        assert staging.choose_slot(sacrifice=True) == staging.slots[1]
        with held(staging.slots[1]):
            assert staging.choose_slot(sacrifice=True) is None


STATE = st.one_of(
    st.none(),
    st.fixed_dictionaries({"scheduled": st.booleans(), "drained": st.booleans(), "busy": st.booleans()}),
)


@given(
    states=st.lists(STATE, min_size=SLOTS, max_size=SLOTS),
    steps=st.permutations(range(SLOTS)),
    sacrifice=st.booleans(),
)
def test_what_is_needed_is_never_given_away(
    states: list[dict[str, bool] | None], steps: list[int], sacrifice: bool
) -> None:
    """Not what somebody holds, not the newest that is not on disk, and no checkpoint of the script's by default."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        staging = StagingArea(Path(folder))
        there = {}
        for slot, state, step in zip(staging.slots, states, steps, strict=True):
            if state is None:
                continue
            there[slot.index] = (step, state)
            slot.begin_snapshot()
            slot.complete_snapshot(snapshot(OUT, step, scheduled=state["scheduled"]))
            if state["drained"]:
                slot.mark_drained()
            if state["busy"]:
                stack.enter_context(held(slot))
        newest = max(there, key=lambda index: there[index][0], default=None)
        chosen = staging.choose_slot(sacrifice=sacrifice)

        def may_go(index: int) -> bool:
            if index not in there:
                return True
            state = there[index][1]
            if state["busy"]:
                return False
            return state["drained"] or (index != newest and (sacrifice or not state["scheduled"]))

        allowed = {slot.index for slot in staging.slots if may_go(slot.index)}
        assert (chosen is None) == (not allowed)
        if chosen is not None:
            assert chosen.index in allowed
            drained = {index for index in allowed if index in there and there[index][1]["drained"]}
            assert chosen.index in (drained or allowed)


# ---- locks ----


def test_one_holds_a_slot_at_a_time(staging: StagingArea) -> None:
    """Through whichever descriptor; the others slots are free."""
    slot = staging.slots[0]
    with slot.locked() as mine, slot.locked() as other:
        assert (mine, other) == (True, False)
        assert slot.busy
        assert not staging.slots[1].busy
    assert not slot.busy
    with held(slot), slot.locked() as mine:
        assert mine is False


def test_who_did_not_get_a_slot_does_not_free_it(staging: StagingArea) -> None:
    """The end of a try that failed is not the end of the other's hold."""
    slot = staging.slots[0]
    with held(slot):
        with slot.locked() as mine:
            assert not mine
        assert slot.busy


def test_a_failure_inside_lets_go(staging: StagingArea) -> None:
    """Whatever it is."""

    def fail() -> None:
        with staging.slots[0].locked():
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not staging.slots[0].busy


def test_the_death_of_who_holds_it_frees_a_slot(staging: StagingArea) -> None:
    """The kernel lets go."""
    slot = staging.slots[0]
    ready, say_ready = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        descriptor = os.open(slot.path / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(say_ready, b"x")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    busy = slot.busy
    os.close(go)
    os.waitpid(child, 0)
    for descriptor in (ready, say_ready, wait):
        os.close(descriptor)
    assert busy
    assert not slot.busy


def test_a_child_forked_meanwhile_does_not_keep_a_slot(staging: StagingArea) -> None:
    """It has the descriptor too: data loaders and reward functions fork when they like."""
    slot = staging.slots[0]
    wait, go = os.pipe()
    with slot.locked() as mine:
        assert mine
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
    busy = slot.busy
    os.close(go)
    os.waitpid(child, 0)
    os.close(wait)
    assert not busy


def test_a_slot_is_waited_for_until_the_deadline(
    staging: StagingArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And taken as soon as it is free."""
    slot, now = staging.slots[0], [0.0]
    stack = ExitStack()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 2.0:
            stack.close()

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    stack.enter_context(held(slot))
    with slot.locked(wait_seconds=1.0) as mine:
        assert not mine
    assert 1.0 <= now[0] < 1.1
    with slot.locked(wait_seconds=10.0) as mine:
        assert mine
    assert 2.0 < now[0] < 2.1


# ---- what else lies there ----


def test_trouble_is_seen_by_all_until_it_is_over(staging: StagingArea) -> None:
    """Ranks look at the same file."""
    rank = StagingArea(staging.path)
    assert not rank.troubled
    staging.set_trouble("the disk is full")
    assert rank.troubled
    assert "the disk is full" in (staging.path / "TROUBLE.json").read_text()
    staging.set_trouble(None)
    staging.set_trouble(None)
    assert not rank.troubled


def test_the_memory_is_given_back(staging: StagingArea) -> None:
    """All of it, twice if need be."""
    fill(staging.slots[0], snapshot(OUT))
    assert staging.size_bytes() > 0
    staging.clear()
    assert not staging.path.exists()
    staging.clear()


def test_a_place_is_the_runs_own(tmp_path: Path) -> None:
    """Runs of one name in other directories have other places; the same directory has the same, however it is named."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    root = tmp_path / "shm"
    root.mkdir()
    mine = staging_path(tmp_path / "a", "exp", root)
    assert mine is not None
    assert mine.parent == root / f"grpo-run-{os.getuid()}"
    assert stat.S_IMODE(mine.parent.stat().st_mode) == 0o700
    assert staging_path(tmp_path / "link", "exp", root) == mine
    assert staging_path(tmp_path / "link" / ".." / "a", "exp", root) == mine
    assert staging_path(tmp_path / "b", "exp", root) != mine
    assert mine.name.startswith("exp-")


def test_a_long_name_still_has_a_place(tmp_path: Path) -> None:
    """A file's name has 255 bytes."""
    found = staging_path(tmp_path, "\N{GOTHIC LETTER AHSA}" * 200, tmp_path)
    assert found is not None
    StagingArea(found)


@pytest.mark.parametrize("mode", [0o750, 0o704, 0o770, 0o777])
def test_a_place_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    """What was put there cannot be trusted, and what is put there is not secret."""
    mine = tmp_path / f"grpo-run-{os.getuid()}"
    mine.mkdir()
    mine.chmod(mode)
    assert staging_path(tmp_path, "run-1", tmp_path) is None


def test_a_place_that_somebody_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system in memory is everybody's: a name can be taken before."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (tmp_path / "grpo-run-4711").mkdir(mode=0o700)
    assert staging_path(tmp_path, "run-1", tmp_path) is None


def test_a_link_or_a_file_in_the_place_is_refused(tmp_path: Path) -> None:
    """Also when it leads to a good directory, or nowhere."""
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    mine = tmp_path / f"grpo-run-{os.getuid()}"
    for target in (good, tmp_path / "nowhere"):
        mine.symlink_to(target)
        assert staging_path(tmp_path, "run-1", tmp_path) is None
        mine.unlink()
    mine.write_bytes(b"")
    assert staging_path(tmp_path, "run-1", tmp_path) is None


def test_without_such_a_file_system_there_is_no_place(tmp_path: Path) -> None:
    """Checkpoints are then written directly."""
    assert staging_path(tmp_path, "run-1", tmp_path / "missing") is None


# ---- whose it is ----


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run's."""
    path = tmp_path / "runs" / "night"
    path.mkdir(parents=True)
    return path


def test_the_next_supervisor_finds_what_the_last_one_left(tmp_path: Path, run_directory: Path) -> None:
    """On the same machine nothing is lost."""
    staging = StagingArea(tmp_path / "memory" / "night")
    staging.claim(0, run_directory)
    fill(staging.slots[0], snapshot(OUT))
    again = StagingArea(staging.path)
    assert again.belongs_to(1)
    again.claim(1, run_directory)
    assert len(again.snapshots()) == 1


@pytest.mark.parametrize("supervisors", [0, 2, 3])
def test_what_another_run_or_an_older_supervisor_left_is_not_ours(
    supervisors: int, tmp_path: Path, run_directory: Path
) -> None:
    """Its directory was deleted and made again, or it went on elsewhere since: old weights must not come back."""
    staging = StagingArea(tmp_path / "memory" / "night")
    staging.claim(0, run_directory)
    fill(staging.slots[0], snapshot(OUT))
    again = StagingArea(staging.path)
    again.claim(supervisors, run_directory)
    assert again.snapshots() == []
    assert again.choose_slot() is not None
    assert again.belongs_to(supervisors + 1)


def test_memory_of_runs_that_are_gone_is_given_back(tmp_path: Path, run_directory: Path) -> None:
    """But not of one whose disk is missing."""
    memory = tmp_path / "memory"
    elsewhere = tmp_path / "unmounted" / "runs" / "far"
    deleted = tmp_path / "runs" / "deleted"
    for name, directory in (("deleted", deleted), ("far", elsewhere)):
        StagingArea(memory / name).claim(0, directory)
    StagingArea(memory / "nobody")
    StagingArea(memory / "night").claim(0, run_directory)
    assert sorted(path.name for path in memory.iterdir()) == ["far", "night", "nobody"]
