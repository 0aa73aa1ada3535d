"""Snapshots that are written to disk while time passes, and what the worker is asked: the shell."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.history.events import CheckpointPublished
from grpo_run.runtime.snapshots._drain_messages import (
    DrainFailed,
    DrainProgress,
    DrainPublished,
    DrainRequest,
)
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.last_writes import write_last
from grpo_run.watchdog.causes import Cause
from support.builders.runtime.draining_run import DIES, World

FREE = 100_000
ENDS = {"dies": DIES, "resets": ConnectionResetError(104, "Connection reset by peer")}


class DrainShell:
    """A run that has just started, with three empty slots. In answers OUT is the output directory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.world = World(folder, monkeypatch)
        self.began = self.world.now
        self.told = 0

    def take(self, slot: str, step: str, *words: str, **fields: str) -> None:
        """A rank writes a snapshot: `own` of the run, `kept` for the user, `urgent`, or `unrecorded`."""
        changes: dict[str, Any] = {
            name: float(value) if name == "staged_at" else value for name, value in fields.items()
        }
        changes |= {word: True for word in words if word in ("kept", "urgent")}
        changes |= {
            name: False for word, name in (("own", "scheduled"), ("unrecorded", "recorded")) if word in words
        }
        for name in {"attempt", "limit", "world_size"} & set(changes):
            changes[name] = int(changes[name])
        self.world.take(int(slot), int(step), layout="ddp", **changes)

    def damage(self, slot: str, file: str = "") -> None:
        """Cut a file of a snapshot, or remove all."""
        files = self.world.staging.slots[int(slot)].files
        if file:
            os.truncate(files / file, 1)
        else:
            shutil.rmtree(files)

    def disk(self, kind: str, reason: str = "No space left on device") -> None:
        """The worker answers in another way from now on.

        Args:
            kind: `works`, `hangs`, `full`, `counts` (full, with another reason each time), `small` (full,
                100 kB free), `fails`, `empty`, `dies`, `resets`, or `works:SECONDS`, small until then.
        """
        world, (kind, _, until) = self.world, kind.partition(":")
        numbers = iter(range(10, 1000))

        def failed(request: DrainRequest) -> list[Any]:
            said = f"{next(numbers)} MiB may be taken" if kind == "counts" else reason
            step = None if kind == "empty" else 5
            full = kind not in ("fails", "empty")
            free = FREE if kind in ("small", "works") else None
            return [DrainFailed(slot=request.slot, step=step, reason=said, full=full, free_bytes=free)]

        answers = {"works": world.drain, "hangs": world.hangs}
        if until:
            world.replies = lambda request: (
                world.drain if world.now > self.began + float(until) else failed
            )(request)
        elif kind in ENDS:
            world.replies = lambda request: [ENDS[kind]]
        else:
            world.replies = answers.get(kind, failed)

    def poll(self, seconds: str = "0.2", *, times: str = "1") -> None:
        """Time passes in polls, of which there is one a second at least."""
        self.world.poll(float(seconds), times=int(times))

    def poll_while_loading(self, seconds: str) -> None:
        """One poll after this time, while ranks load."""
        self.world.now += float(seconds)
        self.world.scheduler.poll(ranks_have_loaded=False)

    def suspend(self, seconds: str) -> None:
        """All processes are stopped for this long."""
        self.world.suspend(float(seconds))

    def reply(self, progress: str = "") -> None:
        """The worker reports bytes, or carries out the request that it was sent last."""
        answer = (
            DrainProgress(written_bytes=int(progress))
            if progress
            else self.world.drain(self.world.requests[-1])[0]
        )
        self.world.send_reply(answer)

    def worker(self, state: str) -> None:
        """The worker `dies` while idle, does not end when asked (`stays`), or cannot start (`refused`)."""
        if state == "refused":
            self.world.refuses_to_start = OSError(12, "Cannot allocate memory")
        elif state == "starts":
            self.world.refuses_to_start = None
        elif state == "dies":
            self.world.processes[-1].alive = False
        else:
            self.world.processes[-1].stubborn = True

    def flush(self, which: str = "all") -> None:
        """Write what is due: the `newest` before a restart, `all` at the end."""
        self.world.scheduler.flush(newest_only=which == "newest")

    def offer(self, memory: str = "") -> str:
        """The snapshot that is offered to the next attempt, which may have to `spare` memory."""
        offered = self.world.scheduler.prepare_attempt(spare_memory=memory == "spare")
        if offered is None:
            return "nothing"
        return f"slot {offered.slot}, call {offered.train_call}, step {offered.order[2]}"

    def published(self, call: str, step: str, *, at: str = "2000", scheduled: str = "") -> None:
        """A rank has written a checkpoint itself, of the state at this time; snapshots are of 1000 s."""
        event = CheckpointPublished(
            train_call=int(call), step=int(step), path="p", time=float(at), scheduled=bool(scheduled)
        )
        self.world.scheduler.note_published(event)

    def memory_is_short(self) -> None:
        """Memory is needed."""
        self.world.scheduler.memory_is_short = True

    def free_memory(self) -> str:
        """Whether any was freed."""
        return "some" if self.world.scheduler.free_memory() else "none"

    def free_slot(self) -> str:
        """Whether a rank has a slot for the next snapshot."""
        return "none" if self.world.staging.choose_slot() is None else "one"

    def drained(self, slot: str) -> None:
        """A snapshot is on disk."""
        self.world.staging.slots[int(slot)].mark_drained()

    def other(self, by: str, step: str, at: str) -> None:
        """A checkpoint of this step, taken at this time, is written: `direct` by a rank, or drained."""
        if by == "direct":
            self.published("1", step, at=at, scheduled="yes")
        else:
            self.take("1", step, attempt="1", staged_at=at)
            self.flush("newest")

    def within(self, seconds: str) -> str:
        """Whether no more time has passed since the beginning."""
        return "yes" if self.world.now - self.began < float(seconds) else "no"

    def supervisor_begins(self, trouble: str = "") -> None:
        """A new supervisor, after one that has left this trouble."""
        if trouble:
            self.world.staging.set_trouble(Cause[trouble], "the disk is full")
        self.world.scheduler = self.world.begin()

    def close(self) -> str:
        """What becomes of the memory."""
        self.world.scheduler.close()
        left = self.world.processes and any(process.alive for process in self.world.processes)
        memory = "kept" if self.world.staging.path.exists() else "freed"
        return f"{memory}{', a worker is alive' if left else ''}"

    def end(self, *, wait: str = "600", signal_after: str = "", only_model: str = "") -> str:
        """End the run; answers what stays in memory, what was said, and how long it took."""
        world, said = self.world, list[str]()
        began = world.now

        def sleep(seconds: float) -> None:
            world.now += seconds

        left = write_last(
            world.scheduler, notify=said.append, clock=lambda: world.now, sleep=sleep,
            wait_seconds=float(wait),
            interrupted=lambda: bool(signal_after) and world.now >= began + float(signal_after),
            only_model=bool(only_model),
        )  # fmt: skip
        what = (
            "nothing is left"
            if left is None
            else f"{'required' if left.required else 'not required'}: {left.sentence}"
        )
        return self._here("\n".join([*said, what, f"after {world.now - began:.0f} s"]))

    def shows(self) -> str:
        """What is on disk, in memory, and asked for, and the trouble that ranks see."""
        world = self.world
        taken = (
            [staged.step for staged, _ in world.staging.snapshots()] if world.staging.path.exists() else []
        )
        lasts = ["", " at the end"]
        asked = [f"{one.slot}{lasts[one.last]}" for one in world.requests]
        killed = sum(process.killed for process in world.processes)
        return (
            f"disk: {' '.join(world.durable) or 'nothing'}; memory: {' '.join(map(str, taken)) or 'nothing'};"
            f" asked for: {', '.join(asked) or 'nothing'}{' (busy)' if world.scheduler.busy else ''};"
            f" workers: {len(world.processes)}{' killed' * killed};"
            f" {world.trouble.name if world.trouble else 'no'} trouble"
        )

    def said(self) -> str:
        """New warnings."""
        new, self.told = self.world.warnings[self.told :], len(self.world.warnings)
        return self._here("\n".join(new) or "nothing")

    def failed(self) -> str:
        """Failures in the journal."""
        found = self.world.named("checkpoint_failed")
        return self._here(
            "\n".join(
                f"{one['cause']}, step {one['step']}{', lost' if one['lost'] else ''}: {one['reason']}"
                for one in found
            )
            or "none"
        )

    def written(self) -> str:
        """Checkpoints in the journal."""
        return self._here(
            "\n".join(
                f"step {one['step']}, {one['path']}, verified {one['verified']}"
                for one in self.world.named("checkpoint_published")
            )
        )

    # the worker's own work, one request at a time

    def drain(self, slot: str = "0") -> str:
        """Write a snapshot to disk; answers what the worker says."""
        said = handle_request(self.world.staging, DrainRequest(slot=int(slot)), lambda written: None)
        assert self.world.staging.slots[int(slot)].drained is isinstance(said, DrainPublished)
        assert not self.world.staging.slots[int(slot)].busy
        if isinstance(said, DrainPublished):
            gone = " ".join(Path(path).name for path in said.removed) or "nothing"
            own = "" if said.scheduled else ", not the script's"
            what = f"published {said.path}, call {said.train_call}, step {said.step}"
            return self._here(f"{what}, {said.size_bytes} bytes{own}, removed {gone}")
        kind = " broken" * said.broken + " full" * said.full
        free = f", {said.free_bytes} bytes free" if said.free_bytes is not None else ""
        return self._here(f"failed{kind}, step {said.step}{free}: {said.reason}")

    def free(self, count: str) -> None:
        """The disk has this many free bytes."""
        usage = SimpleNamespace(total=1 << 40, used=0, free=int(count))
        self.monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def write(self, path: str, content: str = "") -> None:
        """Write a file, with its folders."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(content)

    def make(self, path: str) -> None:
        """Make a directory."""
        (self.folder / path).mkdir(parents=True)

    def holds(self, path: str = "out") -> str:
        """What is in a directory; checkpoints are verified."""
        names = sorted(os.listdir(self.folder / path)) if (self.folder / path).exists() else []
        for name in names:
            if (self.folder / path / name / MANIFEST).exists():
                verify_digests(self.folder / path / name, read_manifest(self.folder / path / name).files)
        return " ".join(names) or "nothing"

    def private(self, path: str) -> bool:
        """Whether only the user may read a directory."""
        return not (self.folder / path).stat().st_mode & 0o077

    def _here(self, text: str) -> str:
        return text.replace(str(self.world.out), "OUT").replace(str(self.world.staging.path), "MEMORY")
