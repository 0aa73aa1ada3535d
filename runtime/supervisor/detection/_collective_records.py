"""The collectives of each rank: Flight Recorder answers joined with the collective logs on the board.

Torch's worker servers listen on one unix socket per rank and answer from C++ threads; for the Flight
Recorder, even while Python is stuck. A build of torch with NCCL has two recorders in each process: what runs
on a device is in NCCL's only, everything else in the other. All ranks are asked before any answer is read,
under one deadline. Used by the deadlock and stall detectors, and by the incident investigation for the
evidence. What cannot be read is listed in `unavailable` and is never treated as proof. Does not judge.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import ValidationError

from grpo_run.runtime.board import collective_log
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import THREADS_HANDLER, Position, ThreadReport
from grpo_run.watchdog.deadlocks.recording import join_recordings, merge, parse_recording
from grpo_run.watchdog.observation import Phase, RankState, Slot

MAX_ANSWER_BYTES = 1024 * 1024
"""256 entries take about 120 KB."""
FLIGHT_RECORDER_HANDLER = "fr_trace_json"
NCCL_RECORDER_HANDLER = "dump_nccl_trace_json"
"""Builds of torch without NCCL do not have it."""
NOT_FOUND = " 404 "
_CONNECT_SECONDS = 0.05
_REQUEST = "POST /handler/{} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


_LEFT = (RankState.between, RankState.returned, RankState.done)
"""States after `train()`. A script past its last line counts only once it has exited: its threads may still
join collectives."""


class NoAnswer(str):
    """The reason of a failure that passes or ends with the rank: the server did not answer in time, or has
    just been reset.

    The kernel resets the connections of a process that exits, before its exit is seen.
    """

    __slots__ = ()


def fetch(
    sockets: Mapping[int, str], seconds: float, handler: str = FLIGHT_RECORDER_HANDLER
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Ask every rank; for its Flight Recorder by default.

    Args:
        sockets: socket paths by rank.
        seconds: deadline for all ranks together; each has `_CONNECT_SECONDS` at least.
        handler: name of the worker server's handler.

    Returns:
        The JSON by rank, and the reason for each rank without one.
    """
    request = _REQUEST.format(handler).encode()
    deadline = time.monotonic() + seconds
    asked: dict[int, socket.socket] = {}
    answers: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    with ExitStack() as stack:
        for rank, path in sockets.items():
            try:
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(_CONNECT_SECONDS)
                connection.connect(path)
                connection.sendall(request)
                asked[rank] = connection
            except (TimeoutError, BlockingIOError):
                failures[rank] = NoAnswer(f"no connection within {_CONNECT_SECONDS:g} s")
            except OSError as error:
                reason = f"{path}: {error.strerror or error}"
                failures[rank] = NoAnswer(reason) if isinstance(error, ConnectionError) else reason
        for rank, connection in asked.items():
            try:
                received = _receive(connection, max(deadline, time.monotonic() + _CONNECT_SECONDS))
            except TimeoutError:
                failures[rank] = NoAnswer(f"no answer within {seconds:g} s")
                continue
            except OSError as error:
                failures[rank] = NoAnswer(error) if isinstance(error, ConnectionError) else str(error)
                continue
            head, _, body = received.partition(b"\r\n\r\n")
            if len(received) > MAX_ANSWER_BYTES:
                failures[rank] = f"answer longer than {MAX_ANSWER_BYTES} bytes"
            elif b" 200 " in head.partition(b"\r\n")[0]:
                answers[rank] = body
            else:
                reason = f"answered {head[:60]!r}"
                failures[rank] = reason if head else NoAnswer(reason)
    return answers, failures


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Read to the end of an answer, or to its first bytes above the limit.

    Raises:
        TimeoutError: the answer has not ended by the deadline (monotonic seconds).
        OSError: the connection has failed.
    """
    received = bytearray()
    while len(received) <= MAX_ANSWER_BYTES:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        data = connection.recv(1 << 17)
        if not data:
            break
        received += data
    return bytes(received)


FETCH_SECONDS = 0.5
"""Deadline for the Flight Recorders of all ranks together, and for their thread reports."""
SILENT_SECONDS = 10.0
"""A rank that does not answer is reported after this time, and after `SILENT_FETCHES` in a row. On a loaded
machine a single answer is often late.
"""
SILENT_FETCHES = 3
MAX_UNANSWERED = 3
"""A rank that has left so many requests for a thread report in a row unanswered is not asked for one again in
this attempt, likewise for NCCL's records. Each one occupies a thread of its worker server, which has 8, until
the interpreter runs or the driver answers."""

Recorded = Mapping[int, tuple[Collective, ...]]
"""Parsed Flight Recorder entries, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Silence:
    """Since when (monotonic seconds) and how many times in a row a rank has not answered."""

    since_seconds: float
    fetches: int

    def lasts(self, now: float) -> bool:
        return self.fetches >= SILENT_FETCHES and now - self.since_seconds >= SILENT_SECONDS


class _Merged(NamedTuple):
    """A rank's two records and what they were joined to."""

    recorded: tuple[Collective, ...]
    log: tuple[Collective, ...]
    records: tuple[Collective, ...]


class Requests:
    """Requests to the ranks' handlers, as long as they are answered.

    A rank that has left `MAX_UNANSWERED` of them in a row unanswered is not asked by that handler again, and
    a handler that this torch does not have asks nobody.
    """

    def __init__(self) -> None:
        self._unanswered: Counter[tuple[str, str]] = Counter()
        """In a row, by handler and socket."""
        self._absent: set[str] = set()

    def lacks(self, handler: str) -> bool:
        """Whether a rank has answered that there is no such handler."""
        return handler in self._absent

    def ask(self, handler: str, sockets: Mapping[int, str]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Ask ranks; returns answers and failures by rank, as `fetch`."""
        if self.lacks(handler):
            return {}, {}
        asked = {r: path for r, path in sockets.items() if self._unanswered[handler, path] < MAX_UNANSWERED}
        answers, failures = fetch(asked, FETCH_SECONDS, handler)
        for rank, path in asked.items():
            self._unanswered[handler, path] = 0 if rank in answers else self._unanswered[handler, path] + 1
        if any(NOT_FOUND in why for why in failures.values()):
            self._absent.add(handler)
        return answers, failures | dict.fromkeys(sockets.keys() - asked.keys(), f"{handler} does not answer")

    def note_unanswered(self, handler: str, socket: str) -> None:
        """A request had no answer, or one that says nothing."""
        self._unanswered[handler, socket] += 1


class CollectiveRecords:
    """Collective records of one attempt.

    `recordings` holds the JSON of the last fetch by rank, `unavailable` the reason for each rank without one.
    A rank that merely does not answer is not listed before that has lasted.

    Args:
        ranks: of this node.
        clock: returns monotonic seconds.
    """

    def __init__(self, ranks: LocalRanks, clock: Callable[[], float]) -> None:
        self._ranks = ranks
        self._clock = clock
        self._silent: dict[int, _Silence] = {}
        self._parsed: dict[int, tuple[bytes, tuple[Collective, ...]]] = {}
        self._requests = Requests()
        self._merged: dict[int, _Merged] = {}
        self._copies: dict[int, bytes] = {}
        self.recordings: dict[int, bytes] = {}
        self.unavailable: dict[int, str] = {}

    def begin_scan(self) -> None:
        """Answer the questions of a new scan by the logs as they are now."""
        self._copies.clear()

    def fetch(self, sockets: Mapping[int, str]) -> dict[int, tuple[Collective, ...]]:
        """Fetch and parse the Flight Recorders behind `sockets` (paths by rank)."""
        self._copies.clear()  # a fetch takes some time
        self.recordings, failures = fetch(sockets, FETCH_SECONDS)
        self._add_nccl(sockets, failures)
        recorded = {}
        for rank, text in self.recordings.items():
            before = self._parsed.get(rank)
            if before is not None and before[0] == text:
                recorded[rank] = before[1]  # parsing costs much, and idle ranks answer identically
                continue
            try:
                recorded[rank] = parse_recording(text)
                self._parsed[rank] = (text, recorded[rank])
            except ValueError as error:
                failures[rank] = str(error)
        self._note_silence(sockets.keys() - failures.keys(), failures)
        self.unavailable = {
            rank: f"no collective records: {why}"
            for rank, why in failures.items()
            if not isinstance(why, NoAnswer) or self._silent[rank].lasts(self._clock())
        }
        return recorded

    def _add_nccl(self, sockets: Mapping[int, str], failures: dict[int, str]) -> None:
        """Add NCCL's records to `recordings`. A rank without them has none: it may have issued more."""
        asked = {rank: sockets[rank] for rank in self.recordings}
        answers, without = self._requests.ask(NCCL_RECORDER_HANDLER, asked)
        if self._requests.lacks(NCCL_RECORDER_HANDLER):
            return
        for rank, reason in without.items():
            del self.recordings[rank]
            failures[rank] = reason
        for rank, text in answers.items():
            try:
                self.recordings[rank] = join_recordings(self.recordings[rank], text)
            except ValueError as error:
                del self.recordings[rank]
                failures[rank] = str(error)

    def _note_silence(self, answered: Iterable[int], unanswered: Iterable[int]) -> None:
        now = self._clock()
        for rank in answered:
            self._silent.pop(rank, None)
        for rank in unanswered:
            before = self._silent.get(rank, _Silence(since_seconds=now, fetches=0))
            self._silent[rank] = replace(before, fetches=before.fetches + 1)

    def fetch_threads(self, sockets: Mapping[int, str]) -> dict[int, ThreadReport]:
        """Fetch and parse the thread reports behind `sockets` (paths by rank).

        A rank whose interpreter does not run has none.
        """
        self._copies.clear()
        answers, _ = self._requests.ask(THREADS_HANDLER, sockets)
        reports = {}
        for rank, text in answers.items():
            try:
                reports[rank] = ThreadReport.model_validate_json(text)
            except ValidationError:
                self._requests.note_unanswered(THREADS_HANDLER, sockets[rank])
        return reports

    def may_be_blocked(self, rank: int, slot: Slot | None) -> bool:
        """Whether the rank's slot says that it waits for other ranks, or may do so in a backward pass."""
        if slot is None:
            return False
        return (
            self.may_be_in_collective(rank, slot)
            or slot.phase is Phase.forward_backward
            or collective_log.is_in_backward(self._copy(rank), slot.collectives_issued)
        )

    def may_be_in_collective(self, rank: int, slot: Slot) -> bool:
        """Whether the rank's log says that it waits in a collective, or that its last one runs on a
        device.
        """
        return collective_log.may_be_in_collective(self._copy(rank), slot.collectives_issued)

    def waiting(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks of which a thread waits in a collective, by their logs."""
        return {rank for rank in ranks if collective_log.is_blocked(self._copy(rank))}

    def current(self, rank: int, slot: Slot) -> tuple[Collective, ...]:
        """The collectives in which threads of the rank are blocked, or its last one on a device, by its
        log.
        """
        again = self._ranks.board.copy_log(self._ranks.local_ranks[rank])
        return collective_log.read_current_collectives(self._copy(rank), again, slot.collectives_issued)

    def has_reached(self, rank: int, slot: Slot, collective: Collective) -> bool:
        """Whether the rank has issued this collective of another rank, or a later one of its group, from
        Python.
        """
        last = collective_log.last_sequence(self._copy(rank), slot.collectives_issued, collective.group)
        return last >= collective.sequence

    def is_blocked(
        self, rank: int, slot: Slot | None, recorded: tuple[Collective, ...] | None
    ) -> bool | None:
        """Whether the rank is blocked in a collective; None if only a missing Flight Recorder can tell."""
        if slot is None:
            return None
        if collective_log.is_blocked(self._copy(rank)):
            return True
        if not self.may_be_blocked(rank, slot):
            return False
        if recorded is None:
            return None
        return any(entry.progress is not CollectiveProgress.completed for entry in recorded)

    def position(
        self,
        rank: int,
        slot: Slot | None,
        recorded: tuple[Collective, ...] | None,
        *,
        exited: bool,
        idle: bool = False,
    ) -> Position:
        """Where the rank is in its collectives, as input for `watchdog.deadlocks.proof.prove`.

        Args:
            idle: its main thread used no CPU time between two polls.
        """
        log = self._ranks.board.collective_log(self._ranks.local_ranks[rank]) if slot is not None else None
        # a running rank whose recorder does not answer, or records nothing of what the log has, may have
        # issued more than its log holds
        unrecorded = log is not None and all(entry.in_memory for entry in log)
        observed = log is not None and (exited or bool(recorded) or (recorded is not None and unrecorded))
        outside = slot is not None and slot.state in (_LEFT if exited else _LEFT[:1])
        return Position(
            rank=rank,
            records=self._merge(rank, recorded or (), log or ()) if observed else None,
            issued=self._ranks.board.messages_sent(self._ranks.local_ranks[rank]) if observed else {},
            exited=exited,
            outside_training=outside,
            left_early=outside and slot is not None and slot.step < slot.target_steps,
            in_backward=idle and slot is not None and _may_be_in_backward(slot, log or ()),
        )

    def _copy(self, rank: int) -> bytes:
        """One copy of a rank's log for all questions of a scan: they are asked several times of every
        rank.
        """
        copy = self._copies.get(rank)
        if copy is None:
            copy = self._copies[rank] = self._ranks.board.copy_log(self._ranks.local_ranks[rank])
        return copy

    def _merge(
        self, rank: int, recorded: tuple[Collective, ...], log: tuple[Collective, ...]
    ) -> tuple[Collective, ...]:
        """Join both records of a rank; the last result while neither has changed."""
        last = self._merged.get(rank)
        if last is None or last.recorded is not recorded or last.log is not log:
            last = self._merged[rank] = _Merged(recorded, log, merge(recorded, log))
        return last.records

    def logs_as_json(self) -> dict[int, object]:
        """Each rank's collective log as plain JSON values; empty if the board was truncated."""
        board = self._ranks.board
        if not board.has_full_size:
            return {}
        return {
            rank: [_as_json(entry) for entry in board.collective_log(local_rank)]
            for rank, local_rank in self._ranks.local_ranks.items()
        }


def _may_be_in_backward(slot: Slot, log: tuple[Collective, ...]) -> bool:
    """Whether the rank's Trainer is in a step's forward and backward pass, or its script in a DDP backward
    pass.
    """
    return slot.phase is Phase.forward_backward or any(
        entry.operation == BACKWARD and not entry.completed for entry in log
    )


def _as_json(entry: Collective) -> dict[str, object]:
    return {
        "group": entry.group,
        "sequence": entry.sequence,
        "operation": entry.operation,
        "sizes": entry.sizes,
        "dtypes": entry.dtypes,
        "progress": entry.progress.name,
        "step": entry.step,
        "at": entry.location.short if entry.location is not None else None,
    }
