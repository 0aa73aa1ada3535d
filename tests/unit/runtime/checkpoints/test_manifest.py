"""Which checkpoints are complete, and whether their bytes are what was written."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.identities import identity
from support.slots import snapshot

from grpo_run.runtime import files
from grpo_run.runtime.checkpoints import digests
from grpo_run.runtime.checkpoints.digests import digest_file, is_read_error, verify_digests
from grpo_run.runtime.checkpoints.manifest import (
    MANIFEST,
    SCHEMA,
    Manifest,
    _digest_fields,
    installed_versions,
    mark_finished,
    read_manifest,
    remove_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.search import find_candidates, find_checkpoints
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import sync_tree

CALL = identity().train_call
FILES = {
    "model.safetensors": b"weights" * 1000,
    "trainer_state.json": b"{}",
    "global_step5/zero_pp_rank_0.pt": b"optimizer",
    "empty.txt": b"",
}


def fill(path: Path) -> Path:
    """A checkpoint directory without a manifest."""
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def publish(path: Path, *, step: int = 5) -> Manifest:
    """A complete checkpoint."""
    what = identity(step=step, world_size=2, versions={"torch": "2.13.0"})
    return write_manifest(fill(path), what)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of step 5."""
    publish(tmp_path / "checkpoint-5")
    return tmp_path / "checkpoint-5"


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Every field."""
    manifest = publish(tmp_path / "checkpoint-5")
    assert read_manifest(tmp_path / "checkpoint-5") == manifest
    assert (manifest.run_id, manifest.train_call, manifest.step, manifest.world_size) == ("run-1", CALL, 5, 2)
    assert manifest.finished is False


def test_a_manifest_covers_every_file(checkpoint: Path) -> None:
    """In folders too, with its size, and not itself."""
    entries = read_manifest(checkpoint).files
    assert {name: entry.size for name, entry in entries.items()} == {
        name: len(content) for name, content in FILES.items()
    }


def test_an_untouched_checkpoint_is_good(checkpoint: Path) -> None:
    """Empty files too."""
    verify_digests(checkpoint, read_manifest(checkpoint).files)


@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """In any byte of any file; the file is named."""
    path = tmp_path_factory.mktemp("flip") / "checkpoint-5"
    manifest = publish(path)
    name = data.draw(st.sampled_from([name for name, content in FILES.items() if content]))
    content = bytearray(FILES[name])
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify_digests(path, manifest.files)


def remove(file: Path) -> None:
    """Gone."""
    file.unlink()


def truncate(file: Path) -> None:
    """Half of it."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def grow(file: Path) -> None:
    """A byte too many."""
    file.write_bytes(file.read_bytes() + b"x")


def replace_by_directory(file: Path) -> None:
    """The name is there, the file is not."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [remove, truncate, grow, replace_by_directory])
@pytest.mark.parametrize("name", ["model.safetensors", "global_step5/zero_pp_rank_0.pt"])
def test_a_harmed_file_is_found_and_named(checkpoint: Path, name: str, harm: Callable[[Path], None]) -> None:
    """With its path, and why it is not trusted."""
    manifest = read_manifest(checkpoint)
    harm(checkpoint / name)
    with pytest.raises(CheckpointError, match=name):
        verify_digests(checkpoint, manifest.files)


def test_a_file_that_cannot_be_read_is_not_trusted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error while reading rejects this checkpoint; an older one may still be good."""

    def broken(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(digests, "digest_file", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        verify_digests(checkpoint, read_manifest(checkpoint).files)


def test_a_file_added_later_does_no_harm(checkpoint: Path) -> None:
    """A person's notes, or a tool's cache."""
    (checkpoint / "notes.txt").write_text("the good one")
    verify_digests(checkpoint, read_manifest(checkpoint).files)


def test_nothing_is_not_published(tmp_path: Path) -> None:
    """A manifest over no files would make an empty directory the newest checkpoint."""
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        write_manifest(tmp_path / "checkpoint-5", identity())
    assert list(find_checkpoints(tmp_path)) == []


def test_publishing_again_does_not_cover_the_old_manifest(checkpoint: Path) -> None:
    """Written anew over what is there now."""
    (checkpoint / "model.safetensors").write_bytes(b"other weights")
    manifest = write_manifest(checkpoint, identity(world_size=2))
    assert set(manifest.files) == set(FILES)
    verify_digests(checkpoint, manifest.files)


def test_finished_is_marked_and_nothing_else(checkpoint: Path) -> None:
    """The bytes stay verified."""
    before = read_manifest(checkpoint)
    mark_finished(checkpoint)
    after = read_manifest(checkpoint)
    assert after == before.model_copy(update={"finished": True, "seal": after.seal})
    assert after.seal != before.seal
    verify_digests(checkpoint, after.files)


def test_a_withdrawn_checkpoint_is_none(checkpoint: Path, tmp_path: Path) -> None:
    """Before its directory is written again; twice does no harm."""
    remove_manifest(checkpoint)
    remove_manifest(checkpoint)
    assert list(find_checkpoints(tmp_path)) == []
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_manifest(checkpoint)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"step": 5}', b"\xff"])
def test_what_is_no_manifest_is_no_checkpoint(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    """Cut short, or another program's: one line, and the directory is passed over."""
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a manifest") as caught:
        read_manifest(checkpoint)
    assert "\n" not in str(caught.value)
    assert list(find_checkpoints(tmp_path)) == []


def test_a_manifest_of_a_later_layout_is_not_trusted(checkpoint: Path) -> None:
    """What a schema we do not know means is not guessed."""
    raw = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(raw | {"schema_version": SCHEMA + 1}))
    with pytest.raises(CheckpointError, match="schema"):
        read_manifest(checkpoint)


def test_the_newest_step_comes_first(tmp_path: Path) -> None:
    """By number, not by name or age."""
    for step in (9, 100, 20):
        publish(tmp_path / f"checkpoint-{step}", step=step)
    assert [found.manifest.step for found in find_checkpoints(tmp_path)] == [100, 20, 9]


def test_incomplete_directories_are_passed_over(tmp_path: Path) -> None:
    """A newer one without a manifest does not hide the complete one."""
    publish(tmp_path / "checkpoint-5")
    fill(tmp_path / "checkpoint-10")
    assert [found.path.name for found in find_checkpoints(tmp_path)] == ["checkpoint-5"]


@pytest.mark.parametrize(
    "name", ["checkpoint-last", "checkpoint", "tmp-checkpoint-7", "checkpoint-²", "runs"]
)
def test_other_directories_are_passed_over(tmp_path: Path, name: str) -> None:
    """Whatever else lies in the output directory."""
    publish(tmp_path / name, step=7)
    publish(tmp_path / "checkpoint-5")
    assert [found.path.name for found in find_checkpoints(tmp_path)] == ["checkpoint-5"]


def test_no_output_directory_has_no_checkpoints(tmp_path: Path) -> None:
    """The script has not made it yet."""
    assert list(find_checkpoints(tmp_path / "out")) == []


def test_versions_name_what_the_format_depends_on() -> None:
    """Each with a version."""
    versions = installed_versions()
    assert {"grpo-run", "torch", "transformers", "trl"} <= set(versions)
    assert all(versions.values())


def rewrite(path: Path, **changes: object) -> None:
    """Change fields of a manifest as nobody of ours would; None takes one away."""
    raw = json.loads((path / MANIFEST).read_text()) | changes
    (path / MANIFEST).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "change", [{"step": 7}, {"world_size": 3}, {"run_id": "run-2"}, {"finished": True}, {"seal": None}]
)
def test_a_changed_manifest_is_not_trusted(checkpoint: Path, change: dict[str, object]) -> None:
    """It still is JSON with every field; its own digest is what tells, and it cannot be left out."""
    rewrite(checkpoint, **change)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        read_manifest(checkpoint)
    (candidate,) = find_candidates(checkpoint.parent)
    assert candidate.corrupt


def test_a_manifest_of_the_first_release_still_reads(checkpoint: Path) -> None:
    """Without the fields that came later, and without a digest of its own."""
    old = ("schema_version", "run_id", "train_call", "step", "world_size", "finished", "versions", "files")
    raw = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({key: raw[key] for key in old}))
    manifest = read_manifest(checkpoint)
    assert (manifest.scheduled, manifest.global_batch, manifest.layout, manifest.seal) == (
        True,
        None,
        None,
        None,
    )
    verify_digests(checkpoint, manifest.files)


def test_a_field_of_a_later_release_is_covered_and_does_no_harm(checkpoint: Path) -> None:
    """The digest is over what is written, not over what this release knows."""
    raw = json.loads((checkpoint / MANIFEST).read_text()) | {"colour": "blue"}
    raw["seal"] = _digest_fields(raw)
    (checkpoint / MANIFEST).write_text(json.dumps(raw))
    assert read_manifest(checkpoint).step == 5
    rewrite(checkpoint, colour="green")
    with pytest.raises(CheckpointError):
        read_manifest(checkpoint)


def test_batch_layout_and_shape_come_back(tmp_path: Path) -> None:
    """As they were given."""
    fields = {
        "scheduled": False, "global_batch": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "layout": "ddp", "model_shape": "abc",
    }  # fmt: skip
    path = fill(tmp_path / "checkpoint-5")
    write_manifest(path, identity(world_size=2, **fields))
    read = read_manifest(path).model_dump()
    assert {name: read[name] for name in fields} == fields


def test_a_snapshots_own_fields_do_not_become_a_manifests(tmp_path: Path) -> None:
    """Its place, its attempt and its format are of memory alone."""
    staged = snapshot(tmp_path, limit=2, best="checkpoint-3", schema_version=7)
    path = fill(tmp_path / staged.folder)
    write_manifest(path, staged)
    raw = json.loads((path / MANIFEST).read_text())
    assert set(raw) == {
        "schema_version", "run_id", "train_call", "step", "world_size", "finished", "scheduled", "global_batch",
        "per_device_train_batch_size", "gradient_accumulation_steps", "layout", "model_shape", "versions", "files",
        "seal",
    }  # fmt: skip
    assert raw["schema_version"] == SCHEMA


def test_every_byte_is_on_disk_before_the_manifest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and each folder was synced while there was no manifest, and the manifest's name after it was."""
    path = fill(tmp_path / "checkpoint-5")
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name), (path / MANIFEST).exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(path, identity())
    before = {name for name, published in synced if not published}
    assert {path / name for name in FILES} | {path, path / "global_step5"} <= before
    assert (path, True) in synced


def test_no_manifest_when_the_disk_refuses_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may say only now that it is full."""
    path = fill(tmp_path / "checkpoint-5")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write_manifest(path, identity())
    assert not (path / MANIFEST).exists()


def test_several_directories_are_one_list(tmp_path: Path) -> None:
    """Newest first over all; at one step the directory named first."""
    for folder, steps in (("a", (5, 20)), ("b", (10, 20))):
        for step in steps:
            publish(tmp_path / folder / f"checkpoint-{step}", step=step)
    found = [found.path.relative_to(tmp_path) for found in find_checkpoints(tmp_path / "a", tmp_path / "b")]
    assert list(map(str, found)) == [
        "a/checkpoint-20",
        "b/checkpoint-20",
        "b/checkpoint-10",
        "a/checkpoint-5",
    ]
    assert next(find_checkpoints(tmp_path / "b", tmp_path / "a")).path.parent.name == "b"


def test_candidates_say_what_is_wrong(tmp_path: Path) -> None:
    """No manifest is no damage; one that was changed is; one of a later release is neither."""
    for step in (1, 2, 3):
        publish(tmp_path / f"checkpoint-{step}", step=step)
    remove_manifest(tmp_path / "checkpoint-1")
    rewrite(tmp_path / "checkpoint-2", step=9)
    rewrite(tmp_path / "checkpoint-3", schema_version=2)
    found = {one.step: (one.corrupt, one.manifest) for one in find_candidates(tmp_path)}
    assert found == {3: (False, None), 2: (True, None), 1: (False, None)}


def test_only_bytes_prove_a_file_bad(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file does; a disk that does not answer says nothing about what is on it."""
    manifest = read_manifest(checkpoint)

    def broken(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest_file", broken)
        with pytest.raises(CheckpointError) as unreadable:
            verify_digests(checkpoint, manifest.files)
    assert is_read_error(unreadable.value)
    remove(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as gone:
        verify_digests(checkpoint, manifest.files)
    assert not is_read_error(gone.value)


@pytest.mark.parametrize("size", [0, 99, 100, 1050])
def test_a_big_file_is_digested_and_synced_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """With progress after each; the digest is that of the whole."""
    monkeypatch.setattr(digests, "READ_BYTES", 100)
    monkeypatch.setattr(files, "WRITE_BACK_BYTES", 100)
    content = os.urandom(size)
    (tmp_path / "model.safetensors").write_bytes(content)
    seen: list[int] = []
    entry = digest_file(tmp_path / "model.safetensors", seen.append)
    assert (entry.size, entry.blake3) == (size, blake3(content).hexdigest())
    assert (sum(seen), len(seen)) == (size, -(-size // 100))
    seen.clear()
    sync_tree(tmp_path, seen.append)
    assert seen == [] or sum(seen) == size


def test_an_error_of_the_disk_in_part_of_a_file_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells it once; `fsync` might not any more. What cannot be done in parts is done at once."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for number in (errno.ENOSYS, errno.EIO):
        library = SimpleNamespace(sync_file_range=lambda *_: -1)
        monkeypatch.setattr(files, "_LIBC", library)
        monkeypatch.setattr(ctypes, "get_errno", lambda number=number: number)
        if number == errno.ENOSYS:
            sync_tree(tmp_path)
            continue
        with pytest.raises(OSError, match="Input/output error"):
            sync_tree(tmp_path)
