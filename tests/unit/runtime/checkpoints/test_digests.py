"""Digests of a checkpoint's files, and their verification."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.manifests import FILES, publish

from grpo_run.runtime.checkpoints import digests
from grpo_run.runtime.checkpoints.digests import digest_file, is_read_error, verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.errors import CheckpointError


@given(data=st.data())
def test_a_flipped_bit_in_any_file_fails_verification(
    make_folder: Callable[[], Path], data: st.DataObject
) -> None:
    """The error names the file."""
    path = make_folder() / "checkpoint-5"
    manifest = publish(path)
    name = data.draw(st.sampled_from([name for name, content in FILES.items() if content]))
    content = bytearray(FILES[name])
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify_digests(path, manifest.files)


def test_a_directory_in_the_place_of_a_file_fails_verification(checkpoint: Path) -> None:
    """The error names the file."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify_digests(checkpoint, read_manifest(checkpoint).files)


def test_a_read_error_is_distinguished_from_a_missing_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error does not prove that the file is damaged."""
    manifest = read_manifest(checkpoint)

    def broken(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest_file", broken)
        with pytest.raises(CheckpointError) as unreadable:
            verify_digests(checkpoint, manifest.files)
    assert is_read_error(unreadable.value)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as gone:
        verify_digests(checkpoint, manifest.files)
    assert not is_read_error(gone.value)


@pytest.mark.parametrize("size", [0, 99, 100, 1050])
def test_a_large_file_is_digested_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Progress is reported after each part."""
    monkeypatch.setattr(digests, "READ_BYTES", 100)
    content = os.urandom(size)
    (tmp_path / "model.safetensors").write_bytes(content)
    seen: list[int] = []
    entry = digest_file(tmp_path / "model.safetensors", seen.append)
    assert (entry.size, entry.blake3) == (size, blake3(content).hexdigest())
    assert (sum(seen), len(seen)) == (size, -(-size // 100))
