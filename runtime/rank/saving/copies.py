"""Copies of snapshots on several hosts: every part is on two hosts, and host 0 has the complete snapshot.

    reserve   rank 0 has chosen a slot; the first rank of every other host empties its own of that index
    write     each host has its part; then, while training continues, in a thread of each first rank:
    copy      every other host sends its part to host 0, and host 0 sends its part to host 1

A slot that is being copied is not chosen for another snapshot. A stop and the end of a call wait for the
copies, because host 0 writes checkpoints to disk, and only complete ones. If a host cannot take a part, the
next snapshot is not taken, and what must reach the disk is saved there directly. If a host is lost, the
thread ends with a warning, and the fault handling of the attempt does the rest. Called by `snapshots.py` and
`_reservation.py`; `runtime/rank/host_link.py` sends and receives.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import ExitStack, suppress

from grpo_run.runtime.history.events import CheckpointFailed
from grpo_run.runtime.rank.host_link import HostLink
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import from_bits, to_bits
from grpo_run.runtime.snapshots.parts import Parts, entries, record_parts
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot, path_of, sizes
from grpo_run.watchdog.causes import Cause

LOCK_SECONDS = 10.0
"""How long a slot may be locked by a process that reads it, or by the copy before."""
POLL_SECONDS = 0.01


def star(hosts: int) -> list[tuple[int, int]]:
    """Return which part is sent to which host, in the order in which all hosts do so. Each sends its own."""
    return [*((host, 0) for host in range(1, hosts)), (0, 1)]


def report_lost(session: Session, staged: StagedSnapshot, cause: Cause, reason: str) -> None:
    """Journal, on rank 0, that a checkpoint in memory will not reach the disk."""
    session.journal.write(
        CheckpointFailed(
            rank=0,
            step=staged.step,
            cause=str(cause),
            reason=reason,
            path=str(path_of(staged)),
            train_call=staged.train_call.ordinal,
            lost=staged.scheduled,
        )
    )


class Copies:
    """The copies of one attempt, on one rank of a run over several hosts.

    Args:
        link: to the other hosts; used on the first rank of each only.
        attempt: the number of the attempt that all hosts have agreed on. Each counts for itself, and a newer
            snapshot must have a higher one.
    """

    def __init__(self, session: Session, link: HostLink, attempt: int) -> None:
        self._session = session
        self._link = link
        self.attempt = attempt
        self._requests: queue.SimpleQueue[tuple[StagingSlot, StagedSnapshot]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.copying: set[int] = set()
        """Indices of the slots that are being copied, or wait for it."""
        self._lost = False
        """Another host is lost."""
        self._refused = False
        """A part was refused since the last reservation."""

    def reserve(self, lock: ExitStack, slot: StagingSlot, staged: StagedSnapshot) -> StagedSnapshot | None:
        """Lock and empty the slot on the other hosts. Collective: one all-reduce.

        Args:
            lock: holds the lock.
            slot: the one of this host that has the index of rank 0's.

        Returns:
            the snapshot as rank 0 describes it; None if a host cannot take its part.
        """
        session, failed = self._session, self._lost or self._refused
        self._refused = False
        if session.leads_host and not session.is_main and not failed:
            try:
                copied = self.wait(LOCK_SECONDS, slot.index)
                failed = not (copied and lock.enter_context(slot.locked(LOCK_SECONDS)))
                if not failed:
                    slot.begin_snapshot()
                    (slot.files / staged.folder).mkdir(parents=True)
                    slot.prepare_snapshot(staged)
            except OSError as error:
                session.warn_in_journal(f"no snapshot: {error}")
                failed = True
        fails, bits = session.votes.maxima([int(failed), to_bits(staged.staged_at) if session.is_main else 0])
        return None if fails else staged.model_copy(update={"staged_at": from_bits(bits)})

    def begin(self, slot: StagingSlot, staged: StagedSnapshot) -> None:
        """Declare the part of this host and begin to copy, on the first rank of a host.

        Raises:
            OSError: the part cannot be declared.
        """
        try:
            own = {self._session.host: entries(sizes(slot.files / staged.folder))}
            record_parts(slot, Parts(staged=staged, hosts=self._session.hosts, files=own))
            slot.discard_spare()
        finally:  # the other hosts wait for this one, and are told that it has nothing
            self.copying.add(slot.index)
            self._requests.put((slot, staged))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="grpo-run-copies")
                self._thread.start()

    def wait(self, seconds: float, index: int | None = None) -> bool:
        """Wait until a slot, or every slot, is copied, or a host is lost; return False after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._lost and (self.copying if index is None else index in self.copying):
            if time.monotonic() >= deadline:
                return False
            self._session.slot.record_work()  # the watchdog sees that this rank waits on purpose
            time.sleep(POLL_SECONDS)
        return True

    def _run(self) -> None:
        try:
            while True:
                slot, staged = self._requests.get()
                self._copy(slot, staged)
                self.copying.discard(slot.index)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on and saves directly to disk
            self._lost = True
            self._session.warn_in_journal(f"snapshots are not copied to other hosts any more: {error}")
        finally:
            self.copying.clear()

    def _copy(self, slot: StagingSlot, staged: StagedSnapshot) -> None:
        host, complete = self._session.host, True
        with ExitStack() as lock:
            with suppress(OSError):  # the staging area was removed: its parts are refused
                lock.enter_context(slot.locked(LOCK_SECONDS, shared=True))
            for part, target in star(self._session.hosts):
                if host not in (part, target):
                    continue
                sends = host == part
                taken = self._link.send(target, slot, part) if sends else self._link.receive(part, slot)
                complete = complete and (taken or target != 0)
                if sends and not taken:
                    text = f"host {target} has not taken part {part} of the snapshot of step {staged.step}"
                    self._session.warn_in_journal(text)
        self._refused = self._refused or not complete
        if not complete and host == 0 and staged.must_reach_disk:
            report_lost(self._session, staged, Cause.unknown, "not all hosts could send their parts of it.")
