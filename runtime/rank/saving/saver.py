"""Make a call's checkpoints complete and verified, most of them without waiting for a disk.

    in memory   the usual way: a snapshot (`snapshots.py`) that the supervisor makes durable
    directly    where memory is not possible (`_direct.py`): no memory, or a script that reads the
                checkpoint during the save

What is written is for `contents.py` to say. Non-finite weights are never saved. Between the script's own
checkpoints, the saver takes snapshots when `_cadence.py` says that one is due, at a stop, for the user, and
at the last step. The script does not notice them: they lie in a folder of their own, and its callbacks are
not called. Created for each `train()` call (`runtime/rank/hooks/train_call.py`) and for each loop
(`runtime/rank/loops/run.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.search import directories_of_run, name_of
from grpo_run.runtime.errors import CheckpointError, Stopped
from grpo_run.runtime.history.events import CheckpointRejected, CheckpointStaged, SnapshotInterval
from grpo_run.runtime.rank.saving._cadence import Cadence
from grpo_run.runtime.rank.saving._direct import DirectSaves
from grpo_run.runtime.rank.saving._reservation import SaveFlags, Written
from grpo_run.runtime.rank.saving.contents import CheckpointContents, SaveMode
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import Flags
from grpo_run.runtime.snapshots.slot import StagedSnapshot
from grpo_run.runtime.upstream import tensor_files
from grpo_run.watchdog.observation import Phase


def has_non_finite_weights(parameters: Iterable[Any]) -> bool:
    """Whether a trained weight on this rank is NaN or infinite. Reads each weight once.

    The logged loss does not show it: transformers logs a NaN loss as 0.0 (`logging_nan_inf_filter`).
    """
    by_device: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue  # unchanged since it was loaded
        local = tensor_files.local_part(parameter)
        if local.numel() and local.is_floating_point():
            if local.element_size() == 1:
                local = local.float()  # torch defines no norm for 8-bit types
            by_device.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        # the maximum norm cannot overflow, and is finite exactly if every value is
        return not all(
            bool(torch.nn.utils.get_total_norm(group, norm_type=float("inf")).isfinite())
            for group in by_device.values()
        )


RETRY_STEPS = 100
"""Steps without snapshots after memory was too small; an abandoned copy costs as much as a full one."""


class Saver:
    """The saves of one call. Every public method is collective.

    Args:
        contents: what is saved.
        snapshots: of this attempt; None to write every checkpoint directly.
        collect_vote: called first, on every rank; collects the vote in progress, so that ranks save after
            agreeing.
    """

    def __init__(
        self,
        contents: CheckpointContents,
        session: Session,
        *,
        snapshots: Snapshots | None,
        collect_vote: Callable[[], object],
    ) -> None:
        self._contents = contents
        self._session = session
        self._snapshots = snapshots
        self.cadence = Cadence(
            session.config.snapshot_every if snapshots is not None else 0,
            keep_every=session.config.keep_every,
            failure_seconds=session.settings.failure_seconds,
            notify=self._report_interval,
            clock=time.monotonic,
        )
        """When snapshots are due."""
        self._call = contents.call
        self._output = Path(self._call.output_dir)
        self._collect_vote = collect_vote
        self._direct = DirectSaves(contents, session)
        self._refused_step: int | None = None
        self._prepared = False
        self._no_snapshots_before = -1
        self.saved_step = -1
        """The step of the last checkpoint, in memory or on disk."""
        self._stop_pending_at = -1
        self.stopping = False
        """All ranks have agreed to stop after the present step's snapshot."""

    def save(self, write: Callable[[Path], Any]) -> Any:
        """Save a checkpoint that the script's own schedule asked for; return what `write` returns.

        Args:
            write: writes this rank's part into the checkpoint's directory.
        """
        self._collect_vote()
        with self._in_phase():
            return self._save(write, scheduled=True)

    def decide(self, step: int, agreed: Flags) -> None:
        """Set what is due after a finished step.

        Args:
            agreed: by all ranks, in the vote before.
        """
        self.stopping |= agreed.stop
        self.cadence.decide(
            step, agreed=agreed.snapshot, required=agreed.save or self.stopping, kept=agreed.save
        )

    def after_step(self) -> None:
        """Take the snapshot that is due after a step or at the end of an epoch; stop if all ranks have
        agreed to.

        A snapshot at the last step of an epoch waits for the end of the epoch, where the trainer may evaluate
        and callbacks may change their state: a run that resumes from it does not repeat these events.

        Raises:
            Stopped: all ranks have agreed to, and the call has steps left.
        """
        if not self._prepared and self._snapshots is not None:
            # only now have the optimizer and its offloading allocated their memory
            self._prepared = True
            self._snapshots.prepare(self._contents.large_files())
        if self._contents.awaits_events:
            return
        cadence, call_ends = self.cadence, self._contents.call_ends
        # a finished call is restored from its last step
        required = cadence.required or call_ends
        if (cadence.due or required) and (self.saved_step != self._step or cadence.kept):
            self._collect_vote()
            with self._in_phase():
                self._take_snapshot(required=required, kept=cadence.kept)
        cadence.done()
        # what this step has saved is the checkpoint of a stop that was requested meanwhile
        if self.stopping or self._stop_pending_at == self._step:
            self._collect_vote()
            if not self._session.votes.maximum(int(call_ends)):
                raise Stopped(self._step)

    def finish(self) -> Path | None:
        """Return the durable checkpoint of the call's last step; save it now if the script did not.

        Returns:
            None if there is none: the weights are non-finite, or the disk is full or stuck.
        """
        session, step = self._session, self._step
        with self._in_phase():
            exists = session.is_main and (self._will_be_durable(step) or self._durable(step) is not None)
            if not session.votes.maximum(int(exists)):
                self._take_snapshot(required=True)
            if self._refused_step == step:
                return None
            in_memory = session.votes.maximum(int(session.is_main and self._will_be_durable(step)))
            if in_memory and (self._snapshots is None or not self._snapshots.wait_durable()):
                # the drain has warned the user, and the end of the run says where it is
                session.warn_in_journal(f"the checkpoint of step {step} in {self._output} is not on disk yet")
                return None
            return self._durable(step)

    def _take_snapshot(self, *, required: bool, kept: bool = False) -> None:
        """Take a snapshot that the script did not ask for."""
        with self._contents.unnoticed():
            self._save(self._contents.write, scheduled=False, required=required, kept=kept)

    def _save(
        self, write: Callable[[Path], Any], *, scheduled: bool, required: bool = True, kept: bool = False
    ) -> Any:
        """Save the present step in memory, or directly on disk if that is not possible and it is required.

        Return what `write` returns for a checkpoint of the script's own schedule that is written directly.
        """
        contents, snapshots = self._contents, self._snapshots
        if self._step < self._no_snapshots_before:
            snapshots = None  # one lacked memory recently; equal on every rank
        if snapshots is None and not required:
            return None
        began = time.perf_counter()
        flags = SaveFlags(
            non_finite=has_non_finite_weights(contents.parameters()),
            mode=contents.save_mode() if scheduled else SaveMode.in_memory,
            disk_short=required and self._direct.disk_is_short(unasked=not scheduled and contents.call_ends),
        )
        taken, returned = False, None
        if snapshots is None:
            flags = flags.maximum(self._session.votes)
        else:
            staged = contents.staged(scheduled=scheduled, urgent=required and not scheduled, kept=kept)
            flags, taken = self._try_snapshot(snapshots, flags, write, staged)
            if taken and (self.stopping or self._stop_pending_at == self._step or contents.call_ends):
                taken = snapshots.await_copies()  # the ranks are about to exit
            if taken and flags.mode == SaveMode.in_memory_then_wait:
                snapshots.wait_durable()
        if flags.non_finite:
            self._refuse_non_finite(scheduled=scheduled)
        elif not taken and required and flags.disk_short:
            self._direct.report_short_disk(self._step, scheduled=scheduled)
        elif not taken and required:
            identity = contents.identity(scheduled=scheduled, kept=kept)
            if scheduled:
                returned = self._direct.save(identity, write, began=began)
            else:
                self._direct.save_snapshot(identity, write, began=began)
            self._note_stop(self._direct.written)
            taken = True
        if taken:
            slot = self._session.slot
            self.saved_step = slot.checkpoint_step = self._step
            slot.checkpoint_seconds += time.perf_counter() - began
        return returned

    def _try_snapshot(
        self, snapshots: Snapshots, flags: SaveFlags, write: Callable[[Path], Any], staged: StagedSnapshot
    ) -> tuple[SaveFlags, bool]:
        """Try to take a snapshot. Return the agreed flags and whether it was taken, equal on every rank."""
        taken = False
        with snapshots.reserve(staged, flags, self._contents.size_bytes) as reservation:
            if reservation.slot is not None:
                taken = snapshots.write(reservation, write)
        if taken:
            self._note_stop(snapshots.written)
            self.cadence.taken(staged.step, snapshots.cost_seconds)
            if self._session.is_main and snapshots.last is not None:
                self._session.journal.write(
                    CheckpointStaged(
                        rank=0,
                        step=staged.step,
                        train_call=self._call.ordinal,
                        scheduled=staged.scheduled,
                        seconds=snapshots.cost_seconds,
                    )
                )
        elif reservation.lacks_memory or reservation.slot is not None:
            self._no_snapshots_before = staged.step + RETRY_STEPS
            snapshots.warn_no_memory(staged.step)
        return reservation.flags, taken

    def _note_stop(self, written: Written) -> None:
        if written.stop_requested:
            self._stop_pending_at = self._step

    @property
    def _step(self) -> int:
        return self._contents.step

    def _will_be_durable(self, step: int) -> bool:
        """Whether the step's checkpoint is in memory and will be written to disk. Called on rank 0.

        A snapshot that the script has not scheduled is written to disk only when it is needed.
        """
        last = self._snapshots.last if self._snapshots is not None else None
        if last is None:
            return False
        _, staged = last
        return staged.must_reach_disk and staged.step == step and staged.train_call == self._call

    def _durable(self, step: int) -> Path | None:
        """Return the complete checkpoint or snapshot of this call and step on disk, or None."""
        run_id = self._session.config.run_id
        for directory in directories_of_run(run_id, self._output):
            path = directory / name_of(directory, step)
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            if manifest.train_call_key == (run_id, self._call.ordinal):
                return path
        return None

    def _refuse_non_finite(self, *, scheduled: bool) -> None:
        """Journal and print, once per step, that the step is not saved."""
        step = self._step
        if self._session.is_main and self._refused_step != step:
            self._session.journal.write(
                CheckpointRejected(
                    rank=0,
                    step=step,
                    path=str(self._output / f"checkpoint-{step}"),
                    reason="weights are not finite.",
                    cause="nonfinite",
                    train_call=self._call.ordinal,
                    lost=scheduled,
                )
            )
            self._session.notify(f"step {step} is not saved: weights are not finite")
        self._refused_step = step

    def _report_interval(self, steps: int, cost_seconds: float, step_seconds: float) -> None:
        """Journal the chosen interval between snapshots, on rank 0; the terminal shows it once in a run."""
        if self._session.is_main:
            self._session.journal.write(
                SnapshotInterval(
                    rank=0,
                    steps=steps,
                    cost_seconds=cost_seconds,
                    step_seconds=step_seconds,
                    failure_seconds=self._session.settings.failure_seconds,
                )
            )

    @contextmanager
    def _in_phase(self) -> Iterator[None]:
        slot = self._session.slot
        try:
            slot.enter(Phase.checkpoint)
            yield
        finally:
            slot.leave(Phase.checkpoint)
