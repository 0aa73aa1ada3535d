"""Saves and drains that are killed at any of their system calls, and checks of the files they leave.

A `VictimServer` is a process with a real trainer that forks a rank that takes a snapshot, or a drain worker
that publishes one. The fork is traced and killed at a `syscalls.Stop`. The functions at the end read the
resulting files as the guard does at the start of the next attempt.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall, read_manifest
from grpo_run.runtime.checkpoints.publishing import clean_partial_directories
from grpo_run.runtime.checkpoints.search import directories_of_run, snapshot_directories, step_of
from grpo_run.runtime.snapshots._drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_policy import next_to_drain
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot
from grpo_run.runtime.upstream.patches import override_attributes
from support import warm
from support.syscalls import Stop, Trace, run_and_kill

OUR_RUN = "run-1"
_made: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Save:
    """A snapshot to take. Every weight is set to `value`, so that two snapshots of one step differ."""

    staging: Path
    output: Path
    step: int
    value: float
    scheduled: bool = True
    run_id: str = OUR_RUN
    world_size: int = 1
    limit: int | None = None


def call_in(output: Path) -> TrainCall:
    """Return the `train()` call of every snapshot here."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(output))


# ---- in the server ----


def _trainer(scratch: Path | None = None) -> Any:
    """Return a real trainer whose optimizer has taken a step; created once, before any fork."""
    if "trainer" not in _made:
        import torch
        from transformers import Trainer, TrainingArguments

        from support.trained_checkpoints import Samples, Sum

        torch.set_num_threads(1)  # a fork inherits no other threads

        arguments = TrainingArguments(
            output_dir=str(scratch), max_steps=1, save_strategy="no", per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=Sum(), args=arguments, train_dataset=Samples())
        trainer.train()
        _made["trainer"] = trainer
    return _made["trainer"]


class _Votes:
    """Votes of one rank, or of two over a socket; exits when the peer has been killed."""

    def __init__(self, peer: socket.socket | None) -> None:
        self._peer = peer

    def maxima(self, values: list[int]) -> list[int]:
        if self._peer is None:
            return values
        size_bytes = 8 * len(values)
        try:
            self._peer.sendall(struct.pack(f"{len(values)}q", *values))
            received = self._peer.recv(size_bytes, socket.MSG_WAITALL)
        except OSError:
            received = b""
        if len(received) < size_bytes:
            os._exit(3)
        return [max(pair) for pair in zip(values, struct.unpack(f"{len(values)}q", received), strict=True)]

    def maximum(self, value: int) -> int:
        return self.maxima([value])[0]


def take_snapshot(save: Save, rank: int = 0, peer: socket.socket | None = None) -> None:
    """Take one rank's part of a snapshot with the code that a rank runs."""
    import torch
    from transformers import set_seed

    from grpo_run.runtime.rank.saving._reservation import SaveFlags
    from grpo_run.runtime.rank.saving.snapshots import Snapshots

    trainer = _trainer()
    set_seed(save.step)  # Python reseeds its own generator in every fork
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(save.value)
    trainer.state.global_step = save.step

    def write(folder: Path) -> None:
        if rank == 0:
            with override_attributes(trainer, _get_output_dir=lambda trial=None: str(folder.parent)):
                trainer._save_checkpoint(trainer.model_wrapped, None)
        torch.save({"rank": rank, "numbers": torch.full((100,), save.value)}, folder / f"rank-{rank}.pth")

    session = SimpleNamespace(
        is_main=rank == 0,
        fence=lambda output_dir: None,
        rank=rank,
        local_world_size=save.world_size,
        votes=_Votes(peer),
        board=SimpleNamespace(requests=(False, False)),
        warn_in_journal=lambda text: None,
        slot=SimpleNamespace(record_work=lambda: None),
    )
    staged = StagedSnapshot(
        run_id=save.run_id, attempt=0, step=save.step, world_size=save.world_size,
        output_dir=str(save.output),
        train_call=call_in(save.output), scheduled=save.scheduled, limit=save.limit, versions={"torch": "2"},
        staged_at=0.0,
    )  # fmt: skip
    snapshots = Snapshots(session, StagingArea(save.staging))  # type: ignore[arg-type]
    with snapshots.reserve(staged, SaveFlags(non_finite=False)) as reservation:
        assert snapshots.write(reservation, write)


def drain(staging: Path, index: int) -> None:
    """Answer one request with the code that the drain worker runs."""
    reply = handle_request(StagingArea(staging), DrainRequest(slot=index), lambda written_bytes: None)
    assert isinstance(reply, DrainPublished), reply


def _saved(save: Save, stop: Stop | None, below: Sequence[Path], victim: int) -> Trace:
    """Take a snapshot with all ranks, one of them traced."""
    if save.world_size == 1:
        return _run(lambda: take_snapshot(save), stop, below)
    ours, theirs = socket.socketpair()

    def rest() -> None:
        ours.close()
        take_snapshot(save, 1 - victim, theirs)

    other = _fork(rest)
    theirs.close()
    try:
        trace = _run(lambda: take_snapshot(save, victim, ours), stop, below)
    finally:
        ours.close()  # the other rank runs until it needs a vote of the killed one
        _, status = os.waitpid(other, 0)
    if trace.at is None and status != 0:
        raise RuntimeError(f"rank {1 - victim} failed, wait status {status:#x}")
    return trace


def _run(work: Callable[[], object], stop: Stop | None, below: Sequence[Path]) -> Trace:
    if stop is not None:
        return run_and_kill(work, stop, below=below)
    child = _fork(work)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the process failed, wait status {status:#x}")
    return Trace(at=None, calls=())


def _fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def _prepare(scratch: Path) -> None:
    """Do once what every fork would do again: create the trainer, and import what a snapshot imports."""
    from grpo_run.runtime.rank.saving import snapshots  # noqa: F401

    trainer = _trainer(scratch)
    trainer._save_checkpoint(trainer.model_wrapped, None)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all objects


def serve(scratch: Path) -> None:
    """Answer requests until the client has gone."""
    connection = Client(str(scratch / "socket"))
    _prepare(scratch)
    while True:
        try:
            kind, arguments, stop, below = connection.recv()
        except EOFError:
            return
        try:
            if kind == "save":
                connection.send(_saved(arguments[0], stop, below, arguments[1]))
            else:
                connection.send(_run(lambda reply=arguments: drain(*reply), stop, below))
        except (OSError, RuntimeError):
            connection.send(traceback.format_exc())


class VictimServer:
    """Forks ranks and drain workers on request; call `close` at the end.

    Args:
        scratch: a folder to make.
    """

    def __init__(self, scratch: Path) -> None:
        scratch.mkdir()
        environment = {**os.environ, **warm.QUIET, "PYTHONPATH": str(Path(__file__).parents[1])}
        with Listener(str(scratch / "socket")) as listener, open(scratch / "printed", "wb") as printed:
            self._process = warm.start(
                [sys.executable, "-P", str(Path(__file__).with_name("victims.py")), str(scratch)],
                cwd=scratch, environment=environment, stdout=printed,
            )  # fmt: skip
            self._connection = listener.accept()

    def save(
        self, save: Save, stop: Stop | None = None, *, below: Sequence[Path] = (), victim: int = 0
    ) -> Trace:
        """Take a snapshot; kill the rank `victim` at `stop`."""
        return self._ask("save", (save, victim), stop, below)

    def drain(
        self, staging: Path, slot: int, stop: Stop | None = None, *, below: Sequence[Path] = ()
    ) -> Trace:
        """Drain a slot."""
        return self._ask("drain", (staging, slot), stop, below)

    def _ask(self, kind: str, arguments: tuple[Any, ...], stop: Stop | None, below: Sequence[Path]) -> Trace:
        self._connection.send((kind, arguments, stop, tuple(below)))
        assert self._connection.poll(120), "the victim server does not answer"
        reply = self._connection.recv()
        assert isinstance(reply, Trace), reply
        return reply

    def close(self) -> None:
        """Stop the server."""
        self._connection.close()
        self._process.wait(10)


# ---- checks ----


def contents(path: Path) -> dict[str, str]:
    """Verify a checkpoint against its manifest and return its digests by file."""
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    return {name: entry.blake3 for name, entry in manifest.files.items()}


def verified_checkpoints(output: Path) -> dict[str, dict[str, str]]:
    """Return the digests of every checkpoint and snapshot on disk, by its name; raise if one does not
    verify.
    """
    return {
        path.name: contents(path)
        for directory in (output, *snapshot_directories(output))
        for path in directory.iterdir()
        if step_of(path) is not None
    }


def resume(output: Path, *also_in: Path, ranks: int = 1) -> Path | None:
    """Return the checkpoint that a later attempt resumes from, chosen as the guard does."""
    from grpo_run.runtime.rank.resuming.choice import choose
    from grpo_run.runtime.rank.resuming.request import ResumeRequest

    for directory in directories_of_run(OUR_RUN, output):
        clean_partial_directories(directory)
    question = ResumeRequest(
        call=call_in(output), run_id=OUR_RUN, world_size=ranks, first_attempt=False, run_started_at=0.0,
        script_argument=None, resume_from=None, also_search=also_in,
    )  # fmt: skip
    problems: list[Any] = []
    choice = choose(question, problems.append)
    assert not problems, problems
    return choice.checkpoint.path if choice.checkpoint is not None else None


def drain_all(staging: Path) -> list[DrainPublished]:
    """Drain what the supervisor drains before the next attempt, in its order."""
    found = StagingArea(staging)
    done = []
    while True:
        due = next_to_drain(
            found.snapshots(), done=lambda staged, slot: slot.drained, newest_first=True, overdue=False
        )
        if due is None:
            return done
        reply = handle_request(found, DrainRequest(slot=due[1].index), lambda written_bytes: None)
        assert isinstance(reply, DrainPublished), reply
        done.append(reply)


def newest(staging: Path) -> tuple[StagedSnapshot, StagingSlot] | None:
    """Return the newest complete snapshot."""
    return next(iter(StagingArea(staging).snapshots()), None)


def unexpected_files(output: Path) -> set[str]:
    """Return what is neither a checkpoint nor a snapshot, and their files that the manifest does not list."""
    folders = {folder for calls in snapshot_directories(output) for folder in (calls, *calls.parents[:2])}
    found = set()
    for path in (path for folder in (output, *folders) for path in folder.iterdir() if path not in folders):
        if step_of(path) is None:
            found.add(os.path.relpath(path, output))
            continue
        known = {MANIFEST, *read_manifest(path).files}
        found |= {
            os.path.relpath(file, output)
            for file in path.rglob("*")
            if file.is_file() and str(file.relative_to(path)) not in known
        }
    return found


def copy(template: Path, target: Path) -> Path:
    """Make a fresh copy for one trial."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(template, target, symlinks=True)
    return target
