"""Directories of checkpoints, and what is published, found, rotated and refused in them: the shell."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from grpo_run.runtime.checkpoints.completeness import count_ranks, find_problems, saved_tensors
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.listing import list_checkpoints
from grpo_run.runtime.checkpoints.manifest import (
    LOCK,
    MANIFEST,
    compute_seal,
    mark_finished,
    mark_kept,
    read_manifest,
    remove_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.publishing import (
    REASON,
    clean_partial_directories,
    is_abandoned,
    partial_directory,
    publish,
    reject_checkpoint,
)
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.checkpoints.search import (
    directories_of_run,
    directory_of,
    find_candidates,
    find_checkpoints,
    lies_beside,
    name_of,
    output_directory_of,
    snapshot_directories,
    step_of,
)
from grpo_run.runtime.errors import CheckpointError
from support import checkpoint_files
from support.identities import identity

MAKERS = {
    "ddp": checkpoint_files.plain,
    "zero2": lambda folder, step, ranks=2: checkpoint_files.deepspeed(folder, step, ranks=ranks, stage=2),
    "zero3": lambda folder, step, ranks=2: checkpoint_files.deepspeed(folder, step, ranks=ranks, stage=3),
    "fsdp2": checkpoint_files.fsdp,
}


class CheckpointShell:
    """An empty directory, HERE in answers. Checkpoints are in `out`, and their weights are a word."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.writing: list[tuple[ExitStack, Path, Path]] = []

    def save(
        self, step: str, *words: str, folder: str = "out", age: str = "0", weights: str = "weights",
        **fields: Any,
    ) -> None:  # fmt: skip
        """Write a checkpoint with its manifest, as old as this many seconds after the first.

        Args:
            words: `own` of the run (a snapshot), `finished`, `kept`.
        """
        if "ordinal" in fields:
            fields["ordinal"] = int(fields["ordinal"])
        what = identity(self.folder / folder, int(step), scheduled="own" not in words, **fields)
        place = directory_of(what, self.folder / folder)
        path = place / name_of(place, int(step))
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_text(weights)
        (path / "state").mkdir(exist_ok=True)
        (path / "state" / "rank0.pt").write_bytes(b"optimum")
        write_manifest(path, what)
        for word, mark in (("finished", mark_finished), ("kept", mark_kept)):
            if word in words:
                mark(path)
        os.utime(path, (1e9 + float(age), 1e9 + float(age)))

    def plain(self, step: str, layout: str = "ddp", *, folder: str = "out", ranks: str = "2") -> None:
        """Write a checkpoint as transformers does, without a manifest."""
        MAKERS[layout](self.folder / folder, int(step), ranks=int(ranks))

    def begin(
        self, step: str, weights: str = "weights", *, run_id: str = "run-1", manifest: str = "yes"
    ) -> None:
        """Begin to write a checkpoint into a directory of its own."""
        stack = ExitStack()
        path = stack.enter_context(partial_directory(self.out, int(step)))
        (path / "model.safetensors").write_text(weights)
        if manifest == "yes":
            write_manifest(path, identity(self.out, int(step), run_id=run_id))
        self.writing.append((stack, path, self.out / f"checkpoint-{step}"))

    def publish(self) -> str | None:
        """Publish what was begun last."""
        stack, path, final = self.writing.pop()
        with stack:
            try:
                publish(path, final)
            except CheckpointError as error:
                return self._here(str(error))
        return None

    def fail(self) -> None:
        """Writing what was begun last fails."""
        try:
            with self.writing.pop()[0]:
                raise OSError("full")
        except OSError:
            pass

    def abandon(self, step: str, lock: str = "") -> None:
        """Leave what a killed process has begun: with a lock file, or without."""
        path = self.out / f".checkpoint-{step}.partial-00ff"
        path.mkdir(parents=True)
        if lock:
            (path / LOCK).touch()

    def clean(self) -> str:
        """Remove what was abandoned; answers its names."""
        begun = [path for _, path, _ in self.writing]
        assert not any(map(is_abandoned, begun))
        return self._names(clean_partial_directories(self.out))

    def reject(self, step: str, reason: str) -> str:
        """Set a checkpoint aside; answers its name and what is written with it."""
        moved = reject_checkpoint(self.out / f"checkpoint-{step}", reason)
        if moved is None:
            return "not rejected"
        said = json.loads((moved / REASON).read_text())
        return self._here(f"{moved.name}: {said['reason']}, was {said['was']}")

    def rotate(self, newest: str, limit: str = "", best: str = "") -> str:
        """Delete old checkpoints after this one; answers which are gone and which remain."""
        place = {step: path for path, step in self._steps()}
        removed = rotate(
            self.out, newest=place[int(newest)], limit=int(limit) if limit else None, best=best or None
        )
        remain = [step for _, step in self._steps()]
        return f"removed {self._list(sorted(map(step_of, removed)))}; remain {self._list(remain)}"

    def write(self, path: str, content: str = "") -> None:
        """Write a file, with its folders."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content.encode("latin-1"))

    def tensors(self, path: str, *names: str) -> None:
        """Write a file of tensors with these names."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        checkpoint_files.safetensors(self.folder / path, dict.fromkeys(names, (2, 2)))

    def header(self, path: str, header: str) -> None:
        """Write a file of tensors with this header."""
        content = header.encode("latin-1")
        (self.folder / path).write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))

    def cut(self, path: str, by: str = "1") -> None:
        """Leave out the last bytes of a file; a negative number adds some."""
        content = (self.folder / path).read_bytes()
        (self.folder / path).write_bytes(content[: -int(by)] if int(by) > 0 else content + b"x" * -int(by))

    def flip(self, path: str) -> None:
        """Change the last byte of a file."""
        content = bytearray((self.folder / path).read_bytes())
        content[-1] ^= 1
        (self.folder / path).write_bytes(content)

    def remove(self, path: str) -> None:
        """Remove a file."""
        (self.folder / path).unlink()

    def unpublish(self, path: str) -> None:
        """Remove a manifest, if there is one."""
        remove_manifest(self.folder / path)

    def make(self, *paths: str) -> None:
        """Make directories."""
        for path in paths:
            (self.folder / path).mkdir(parents=True)

    def move(self, path: str, new: str) -> None:
        """Rename a directory."""
        os.rename(self.folder / path, self.folder / new)

    def link(self, path: str, target: str) -> None:
        """Make a link."""
        (self.folder / path).symlink_to(self.folder / target)

    def rewrite(self, path: str, *, seal: str = "", **fields: str) -> None:
        """Change fields of a manifest; empty ones are removed. The seal stays as it is, or is made anew."""
        file = self.folder / path / MANIFEST
        raw = json.loads(file.read_text()) | {
            name: json.loads(value or "null") for name, value in fields.items()
        }
        raw = {name: value for name, value in raw.items() if value is not None}
        if seal == "new":
            raw["seal"] = compute_seal(raw)
        elif seal == "none":
            del raw["seal"]
        file.write_text(json.dumps(raw))

    def holds(self, path: str = "out") -> str:
        """What is in a directory, with the weights of what can be verified."""
        return "\n".join(self._described(one) for one in sorted((self.folder / path).iterdir()))

    def verify(self, path: str) -> str:
        """Whether the files of a checkpoint are those of its manifest."""
        try:
            manifest = read_manifest(self.folder / path)
            verify_digests(self.folder / path, manifest.files)
        except CheckpointError as error:
            return self._here(str(error))
        marks = [word for word in ("finished", "kept") if getattr(manifest, word)]
        return " ".join([f"step {manifest.step} of {manifest.run_id}", *marks, *sorted(manifest.files)])

    def found(self, *folders: str) -> str:
        """Checkpoints in directories, the newest first."""
        return self._names(
            one.path for one in find_checkpoints(*(self.folder / folder for folder in folders))
        )

    def candidates(self, folder: str = "out") -> str:
        """Also what has no valid manifest."""
        seen = [
            f"{one.step}{' corrupt' * one.corrupt}{' without manifest' * (one.manifest is None)}"
            for one in find_candidates(self.folder / folder)
        ]
        return ", ".join(seen) or "none"

    def places(self, run_id: str = "run-1") -> str:
        """Where checkpoints and snapshots of a run are, and where the next snapshot is put."""
        where = "beside" if lies_beside(self.out) else "inside"
        return f"{where}; {self._names(directories_of_run(run_id, self.out))}"

    def belongs(self, path: str) -> str:
        """The step of a directory by its name, and the output directory that it belongs to."""
        full = self.folder / path
        return f"step {step_of(full)} of {self._here(str(output_directory_of(full)))}"

    def transformers(self) -> str:
        """The newest checkpoint for transformers."""
        last = get_last_checkpoint(str(self.out))
        return self._here(str(last))

    def transformers_rotate(self, limit: str) -> None:
        """Transformers deletes old checkpoints."""
        rotate_checkpoints(output_dir=str(self.out), save_total_limit=int(limit), use_mtime=True)

    def listed(self, path: str = "out", verify: str = "") -> str:
        """The table of `grpo-run checkpoints`."""
        rows = []
        for one in list_checkpoints(self.folder / path, verify=bool(verify)):
            assert one.as_json()["step"] == one.step
            shown = one.as_json().get("scheduled")
            own = ", not the script's" * (shown is False)
            problem = f": {self._here(one.problem)}" if one.problem else ""
            rows.append(
                f"{one.step} {one.state.value}, ranks {one.ranks}, verified {one.verified}{own}{problem}"
            )
            assert min(one.size_bytes, one.modified_at) > 0
        return "\n".join(rows) or "none"

    def problems(self, path: str, ranks: str = "2", deep: str = "") -> str:
        """Why a checkpoint without a manifest cannot be used."""
        count = int(ranks) if ranks != "unknown" else None
        found = find_problems(self.folder / path, count, verify_checksums=bool(deep))
        return self._here("\n".join(found)) or "none"

    def contains(self, path: str) -> str:
        """The number of ranks that wrote a checkpoint, and the names of its tensors."""
        full = self.folder / path
        return f"ranks {count_ranks(full)}, tensors {self._list(saved_tensors(full))}"

    def _steps(self) -> list[tuple[Path, int]]:
        snapshots = (path for place in snapshot_directories(self.out) for path in place.glob("snapshot-*"))
        paths = (*self.out.glob("checkpoint-*"), *snapshots)
        return sorted(
            ((path, step) for path in paths if (step := step_of(path)) is not None), key=lambda one: one[1]
        )

    def _described(self, path: Path) -> str:
        name = self._here(path.name)
        if not (path / MANIFEST).exists():
            return name
        try:
            verify_digests(path, read_manifest(path).files)
        except CheckpointError as error:
            return f"{name} {self._here(str(error))}"
        return f"{name} {(path / 'model.safetensors').read_text()}"

    def _names(self, paths: Any) -> str:
        return self._here(", ".join(str(path) for path in paths)) or "none"

    def _list(self, values: Any) -> str:
        return " ".join(map(str, values)) or "none"

    def _here(self, text: str) -> str:
        return re.sub(r"partial-[0-9a-f]+", "partial", text.replace(str(self.folder), "HERE"))
