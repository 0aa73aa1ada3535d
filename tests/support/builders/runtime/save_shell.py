"""A rank whose trainer saves, and what is on disk, in memory and in the journal: the shell of transcripts."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall, read_manifest, write_manifest
from grpo_run.runtime.checkpoints.search import snapshot_directories
from grpo_run.runtime.errors import Stopped
from grpo_run.runtime.rank.saving import _direct, _reservation, _spare_files
from grpo_run.runtime.rank.saving import snapshots as snapshots_module
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import Headroom
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Slot
from support.identities import identity
from support.saving import Guarded, Trainer, named

SETTINGS = {
    "limit": "save_total_limit", "only_model": "save_only_model", "hub": "push_to_hub",
    "best_by": "metric_for_best_model",
}  # fmt: skip
FULL = Headroom(name="a full limit", free_bytes=0, total_bytes=1 << 30)
ENOUGH = Headroom(name="an empty limit", free_bytes=1 << 40, total_bytes=1 << 41)


class SaveShell:
    """Rank 0 of run-1. HERE is its directory, `out` the trainer's, and OWN that of its snapshots."""

    def __init__(
        self, folder: Path, session: Any, events: Callable[[], list[dict[str, Any]]],
        reading: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        self.folder, self.out = folder, folder / "out"
        self.session, self.events, self.reading, self.monkeypatch = session, events, reading, monkeypatch
        self.waits: list[str] = []
        self.action, self.seen, self.told_before, self.journaled = "", "", 0, 0
        time = SimpleNamespace(sleep=self._sleep, monotonic=lambda: 100.0, perf_counter=lambda: 100.0)
        monkeypatch.setattr(_reservation, "time", time)
        monkeypatch.setattr(snapshots_module, "time", time)

    def trainer(self, kind: str, **settings: str) -> None:
        """A call begins, which saves in `memory` first or on `disk`."""
        self.made = Trainer(self.out)
        self.made.during = self._during
        self.set(**settings)
        call = TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(self.out))
        area = StagingArea(self.folder / "memory")
        snapshots = Snapshots(self.session, area) if kind == "memory" else None
        self.guarded = Guarded(self.made, self.session, call, snapshots)

    def set(self, **settings: str) -> None:
        """Change settings of the script, of which `yes` is True and nothing is False."""
        for name, value in settings.items():
            known: Any = {"yes": True, "": False}.get(value, int(value) if value.isdigit() else value)
            setattr(self.made.args, SETTINGS[name], known)

    def settings(self) -> str:
        """The settings of the script."""
        return ", ".join(f"{name} {getattr(self.made.args, field)}" for name, field in SETTINGS.items())

    def rank(self, number: str) -> None:
        """This is another rank."""
        self.session.is_main = number == "0"

    def run(self, run_id: str) -> None:
        """This is another run."""
        self.session.config = replace(self.session.config, run_id=run_id)

    def during(self, action: str) -> None:
        """While the trainer writes, it `fails`, a `stop` is asked for, or it has found a `better` one."""
        self.action = action

    def card(self, problem: str) -> None:
        """The model card cannot be written: the disk is `full`, or `refused`."""
        number = errno.ENOSPC if problem == "full" else errno.EACCES

        def fail() -> None:
            raise OSError(number, os.strerror(number))

        self.made.create_model_card = fail  # type: ignore[method-assign]

    def best(self, step: str) -> None:
        """The trainer has found the best checkpoint."""
        state: Any = self.made.state
        state.best_model_checkpoint = str(self.out / f"checkpoint-{step}")

    def nonfinite(self) -> None:
        """A weight becomes NaN."""
        self.guarded.make_non_finite()

    def memory(self, state: str) -> None:
        """Memory is `short`, or there is `enough`."""
        headroom = FULL if state == "short" else ENOUGH
        self.monkeypatch.setattr(_spare_files, "least_headroom", lambda folder: headroom)

    def disk(self, state: str) -> None:
        """The disk has room for the newest checkpoint, for `less`, for `nothing`, or it is `stale`."""
        published = named(self.events, "checkpoint_published")
        size = published[-1]["size_bytes"] if published else 0
        free = {"less": size - 1, "nothing": 0}.get(state, size)

        def usage(path: Path) -> SimpleNamespace:
            if state == "stale":
                raise OSError(errno.ESTALE, "Stale file handle")
            return SimpleNamespace(free=free, total=1 << 41, used=0)

        self.monkeypatch.setattr(_direct.shutil, "disk_usage", usage)

    def wait(self, *what: str) -> None:
        """What happens at each poll while the rank waits: `nothing`, a `drain`, or disk `trouble`."""
        self.waits += what

    def save(self, step: str) -> str | None:
        """The schedule of the script saves."""
        self.made.state.global_step = int(step)
        card = self.made.create_model_card
        try:
            assert self.made._save_checkpoint("model", None) in ("what the method returns", None)
        except OSError as error:
            return f"raised {error}"
        finally:
            assert self.made.create_model_card == card
        return None

    def step(self, step: str, *words: str) -> str | None:
        """After a step a snapshot is `due`, `required` or `kept`, or the script saves (`scheduled`)."""
        self.made.state.global_step = int(step)
        required = bool({"required", "kept"} & set(words))
        self.guarded.saver.cadence.decide(
            int(step), agreed="due" in words, required=required, kept="kept" in words
        )
        self.made.should_save = "scheduled" in words
        return self._step_ends()

    def ends(self, what: str) -> str | None:
        """The `epoch`, the `script` or the `last` step ends with the next step; `now` are its events over."""
        if what == "epoch":
            self.made.state.epoch = 2.0
        elif what == "script":
            self.made.control.should_training_stop = True
        elif what == "last":
            self.made.state.max_steps = 5
        else:
            self.guarded.exact_state.epoch_ended = True
            self.made.should_save = False
            return self._step_ends()
        return None

    def stop(self, known: str = "") -> None:
        """A stop is asked for, which all ranks may know."""
        if known:
            self.guarded.saver.stopping = True
        else:
            self.session.board.request_stop()

    def finish(self, step: str) -> str:
        """The call ends after this step; answers its durable checkpoint."""
        self.made.state.global_step = int(step)
        return self._here(str(self.guarded.saver.finish()))

    def drain(self) -> str:
        """The supervisor writes the newest snapshot."""
        return self._here(str(self.guarded.drain()))

    def foreign(self, step: str, **fields: str) -> None:
        """A checkpoint of another run or call."""
        path = self.out / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "old.bin").write_bytes(b"old")
        changes: dict[str, Any] = {name: int(one) if one.isdigit() else one for name, one in fields.items()}
        write_manifest(path, identity(self.out, int(step), **changes))

    def saved(self) -> str:
        """Steps on disk and in memory, and how often the trainer has written."""
        staged = self.guarded.staged if self.guarded.given_snapshots is not None else []
        memory = [f"{step}{'' if scheduled else ' own'}" for step, scheduled in staged]
        places = [self.out, *snapshot_directories(self.out)]
        found = sorted(path for place in places if place.exists() for path in place.iterdir())
        disk = [path.name for path in found if path.name != "_grpo_run"]
        where = f"disk: {', '.join(disk) or '-'}; memory: {', '.join(memory) or '-'}"
        return f"{where}; writes: {len(self.made.seen)}"

    def newest(self) -> str:
        """The step that counts as saved, and the steps of which snapshots were taken."""
        taken = [str(step) for step, _ in self.guarded.taken]
        return (
            f"saved {self.guarded.saver.saved_step}, taken {' '.join(taken) or '-'}, cards {self.made.cards}"
        )

    def verify(self, path: str) -> str:
        """A checkpoint's manifest, after its files were compared."""
        folder = self.folder / path.replace("OWN", "out_grpo_run/run-1/call-1")
        if not (folder / MANIFEST).exists():
            return "no manifest"
        manifest = read_manifest(folder)
        verify_digests(folder, manifest.files)
        size = sum(entry.size for entry in manifest.files.values())
        published = named(self.events, "checkpoint_published")
        assert {one["size_bytes"] for one in published if one["path"] == str(folder)} <= {size}
        marks = "".join(f", {name}" for name in ("scheduled", "kept", "finished") if getattr(manifest, name))
        call = manifest.train_call
        return (
            f"{manifest.run_id}, call {call.ordinal}, step {manifest.step}, {manifest.world_size} ranks,"
            f" batch {manifest.global_batch}, {manifest.layout}{marks}: {' '.join(sorted(manifest.files))}"
        )

    def saw(self) -> str:
        """How things were during the last write."""
        return self.seen

    def board(self) -> str:
        """What the board shows."""
        self.session.slot.publish()
        phases = [one.phase.name for one in self.reading().phases]
        return f"checkpoint of step {self.reading().checkpoint_step}, in {' '.join(phases) or 'no phase'}"

    def told(self) -> str:
        """New messages to the user."""
        new, self.told_before = self.session.notified[self.told_before :], len(self.session.notified)
        return self._here("\n".join(new)) or "nothing"

    def journal(self) -> str:
        """New events."""
        records, self.journaled = self.events()[self.journaled :], len(self.events())
        return self._here("\n".join(map(described, records))) or "nothing"

    def _step_ends(self) -> str | None:
        try:
            assert self.made._maybe_log_save_evaluate(0.5) == "what that returns"
        except Stopped:
            return "stopped"
        return None

    def _during(self, path: Path) -> None:
        others = sorted(one.name for one in path.parent.iterdir() if one != path)
        args = self.made.args
        phase = self.reading().phase
        self.seen = (
            f"manifest {(path / MANIFEST).exists()}, others {' '.join(others) or '-'},"
            f" in {phase.name if phase else '-'}; {self.settings()}, strategy {args.save_strategy!s}"
        )
        if self.action == "fails":
            raise PermissionError(errno.EACCES, "Permission denied")
        if self.action == "stop":
            self.session.board.request_stop()
        if self.action == "better":
            self.best(path.name.partition("-")[2])

    def _sleep(self, seconds: float) -> None:
        assert self.waits, "the rank polls more often than expected"
        what = self.waits.pop(0)
        if what == "drain":
            self.guarded.drain()
        elif what == "trouble":
            self.guarded.snapshots.staging.set_trouble(Cause.disk_full)

    def _here(self, text: str) -> str:
        own = str(self.folder / "out_grpo_run/run-1/call-1")
        text = re.sub(r"[\d.]+ KiB", "SIZE", text)
        return text.replace(own, "OWN").replace(str(self.folder), "HERE")


def described(record: dict[str, Any]) -> str:
    """An event with the fields that tell one from another."""
    shown = [
        f"{name} {record[name]}"
        for name in ("step", "train_call", "cause", "scheduled", "verified", "path", "reason", "text")
        if record.get(name) is not None
    ]
    return f"{record['event']}: {', '.join(shown)}"
