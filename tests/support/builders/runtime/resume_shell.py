"""Checkpoints of a call, and which one it resumes from: the shell of transcripts."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry, digest_model_shape
from grpo_run.runtime.checkpoints.manifest import (
    MANIFEST,
    TrainCall,
    mark_finished,
    read_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.train_calls import CallDirectory, KnownCall
from grpo_run.runtime.rank.resuming import _fit
from grpo_run.runtime.rank.resuming.choice import choose
from grpo_run.runtime.rank.resuming.identification import find_mismatch, identify, is_same_directory
from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeRequest
from support import checkpoint_files
from support.identities import identity

STARTED_AT = 2_000_000_000.0
"""Wall time of the start of the run."""
AT = 1_790_000_000.0
"""When the known calls were begun: 2026-09-21 14:13:20 UTC. The present attempt is two hours later."""


class ResumeShell:
    """The first call of run-1 on two ranks, and an output directory, OUT in answers, without checkpoints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.output = folder / "out"
        self.output.mkdir()
        self.calls: list[KnownCall] = []
        self.request = ResumeRequest(
            call=TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(self.output)),
            run_id="run-1", world_size=2, first_attempt=True, run_started_at=STARTED_AT, script_argument=None,
            resume_from=None,
        )  # fmt: skip

    def save(
        self, step: str, *words: str, folder: str = "out", shape: str = "", batch: str = "", **fields: Any
    ) -> None:
        """Write a checkpoint of two ranks with its manifest.

        Args:
            words: `finished`.
            shape: of the model's only parameter, `4,2`.
            batch: ranks, samples of each and accumulation, `2x4x1`.
        """
        changes: dict[str, Any] = {"world_size": 2} | {
            name: int(value) if value.isdigit() else value for name, value in fields.items()
        }
        if batch:
            ranks, each, accumulation = map(int, batch.split("x"))
            changes |= {
                "world_size": ranks, "per_device_train_batch_size": each,
                "gradient_accumulation_steps": accumulation,
                "global_batch": ranks * each * accumulation, "layout": fields.get("layout", "ddp"),
            }  # fmt: skip
        if shape:
            changes["model_shape"] = digest_model_shape(shapes_of(shape))
        path = checkpoint_files.plain(self.folder / folder, int(step))
        write_manifest(path, identity(self.folder / folder, int(step), **changes))
        if "finished" in words:
            mark_finished(path)

    def plain(self, step: str, written: str = "", *, folder: str = "out") -> None:
        """Write a checkpoint without a manifest, `before` or `after` the run has started."""
        path = checkpoint_files.plain(self.folder / folder, int(step))
        if written:
            at = STARTED_AT + (1000 if written == "after" else -1000)
            os.utime(path, (at, at))

    def damage(self, path: str, how: str = "flip") -> None:
        """Flip a byte of the weights, remove a file, or cut the manifest."""
        checkpoint = self.folder / path
        if how == "flip":
            content = bytearray((checkpoint / "model.safetensors").read_bytes())
            content[-1] ^= 1
            (checkpoint / "model.safetensors").write_bytes(content)
        elif how == "remove":
            (checkpoint / "optimizer.pt").unlink()
        else:
            (checkpoint / MANIFEST).write_text("{")

    def folder_of_runs(self) -> None:
        """Make a directory that is no checkpoint."""
        (self.folder / "runs").mkdir()

    def ask(self, *, batch: str = "", shape: str = "", call: str = "1", argument: str = "",
        memory: str = "", also: str = "",
            reshard: str = "", first_attempt: str = "yes", **fields: Any) -> str:  # fmt: skip
        """What the call resumes from, with a line for each checkpoint that is rejected.

        Args:
            argument: the script's own; `True` is the constant.
            memory: the checkpoint that is in memory; `also`: a folder that is searched too.
            reshard: a checkpoint, or `all`, whose state cannot be divided among these ranks.
        """
        changes: dict[str, Any] = {
            name: value == "yes" if name == "fresh" else value for name, value in fields.items()
        }
        for name in ("resume_from", "argument"):
            value = argument if name == "argument" else changes.get("resume_from", "")
            path = self.folder / value
            changes["script_argument" if name == "argument" else name] = (
                True if value == "True" else str(path) if value and path.exists() else value or None
            )
        if batch:
            ranks, each, accumulation = map(int, batch.split("x"))
            changes |= {
                "world_size": ranks,
                "batch": BatchGeometry(ranks=ranks, per_device=each, accumulation=accumulation),
            }
        if shape:
            changes["parameters"] = shapes_of(shape)
        if memory:
            changes["in_memory"] = FoundCheckpoint(
                path=self.folder / memory, manifest=read_manifest(self.folder / memory)
            )
        if also:
            changes["also_search"] = (self.folder / also,)
        problem = "it is inside a rollout"
        self.monkeypatch.setattr(
            _fit, "resharding_problem", lambda path, ranks: problem if reshard in ("all", path.name) else None
        )
        own = self.request.call.model_copy(update={"ordinal": int(call)})
        request = replace(self.request, call=own, first_attempt=first_attempt == "yes", **changes)
        lines: list[str] = []

        def report(one: RejectedCheckpoint) -> None:
            marks = f"{' as corrupt' if one.corrupt else ''}{'' if one.own else ', which is not its own'}"
            lines.append(f"rejected {one.path.name}{marks}: {one.reason}")

        try:
            choice = choose(request, report)
        except UsageError as error:
            return self._here("\n".join([*lines, f"refused: {error}"]))
        words = [str(choice.argument or "step 0"), *(["finished"] if choice.finished else [])]
        words += ["in memory"] * choice.in_memory + ["as the script says"] * choice.from_script
        words += [] if choice.checkpoint is None else [f"(step {choice.checkpoint.manifest.step})"]
        return self._here("\n".join([*lines, " ".join(words), *([choice.notice] if choice.notice else [])]))

    def known(
        self, ordinal: str, trainer: str, path: str, *words: str, settings: str = "s", saved: str = "5"
    ) -> None:
        """An earlier attempt has begun a call, and reached step 6 of 10: `finished` or `interrupted`."""
        self.calls.append(
            KnownCall(
                ordinal=int(ordinal), trainer_class=trainer, settings=settings,
                directories=(directory(path, AT),),
                reached=6, saved=int(saved), target_steps=10,
                checkpoint=f"{path}/checkpoint-{saved}" if int(saved) else None,
                finished="finished" in words, interrupted="interrupted" in words,
            )
        )  # fmt: skip

    def identify(
        self,
        trainer: str,
        path: str,
        *,
        claimed: str = "",
        settings: str = "s",
        step: str = "",
        rejected: str = "",
    ) -> str:
        """Which call of the run the script's first one is, and what is said if it starts from a step."""
        path = str(self.output) if path == "OUT" else path
        call = TrainCall(ordinal=1, trainer_class=trainer, output_dir=path)
        taken = [int(one) for one in claimed.split(",") if one]
        found = identify(
            call, self.calls, taken, settings=settings, directory=directory(path, AT + 7200), run_id="run-1"
        )
        marks = [
            f"{name} {one.ordinal}"
            for name, one in (("known as", found.known), ("lost", found.lost), ("skipped", found.skipped))
            if one is not None
        ]
        marks += [f"moved from {found.moved_from}"] * bool(found.moved_from)
        marks += [f"also in {', '.join(map(str, found.directories))}"] * bool(found.directories)
        lines = [", ".join([f"call {found.call.ordinal}", *marks])]
        if step:
            mismatch = find_mismatch(
                found, step=int(step), rejected=bool(rejected), output_dir=found.call.output_dir
            )
            lines += (
                ["nothing is said"]
                if mismatch is None
                else [f"{'serious: ' * mismatch.serious}{mismatch.text}"]
            )
        return self._here("\n".join(lines))

    def same(self, old: str, new: str, *, pids: str = "", later: str = "7200") -> bool:
        """Whether two names are of one directory, of which the second was chosen so many seconds later."""
        old, new = (name.replace("TMP", tempfile.gettempdir()) for name in (old, new))
        first, second = (int(pid) for pid in (pids or "0,0").split(","))
        return is_same_directory(
            directory(old, AT, 20.0, first), directory(new, AT + float(later), 20.0, second)
        )

    def _here(self, text: str) -> str:
        return text.replace(str(self.output), "OUT").replace(str(self.folder), "HERE")


def shapes_of(text: str) -> tuple[Any, ...]:
    """The only parameter of a model, with this shape."""
    return (("weight", tuple(map(int, text.split(","))), "float32"),)


def directory(path: str, at: float, seconds: float = 5.0, pid: int = 0) -> CallDirectory:
    """A directory whose name was chosen within some seconds."""
    return CallDirectory(path=path, not_before=at, not_after=at + seconds, pid=pid)
