"""What each host of a run knows of a fault, and the joint evidence that all of them judge alike.

A host reports its slots, exits, errors and positions; what the reports of all hosts say together is judged as
if one host had seen it. A verdict that only one host can reach, on a hang of its ranks or on its own memory,
is reported as such and taken over by the others. Called by `runtime/supervisor/other_hosts.py`; `fault.py`
diagnoses the result. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.diagnosis.fault import Evidence, diagnose
from grpo_run.watchdog.json_values import pack
from grpo_run.watchdog.observation import Exit, RankError, Slot
from grpo_run.watchdog.verdict import Location, Verdict

Value = TypeVar("Value")
MAX_TEXT = 8000
"""Characters of a message or of a traceback that are told to other hosts."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What one host knows of a fault.

    Attributes:
        node: number of the host in this attempt.
        host: its name.
        ranks: of the host.
        slots: of its ranks; empty if there was no room for them.
        exits: of its ranks, each with when it was seen, in seconds since the epoch.
        errors: of ranks that have not been seen to exit.
        positions: of its ranks in their collectives; empty if they could not be read.
        verdict: that only this host can reach; None if the reports of all decide.
    """

    node: int
    host: str
    ranks: tuple[int, ...]
    slots: Mapping[int, Slot | None]
    exits: tuple[tuple[float, Exit], ...] = ()
    errors: Mapping[int, RankError] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def has_fault(self) -> bool:
        """Whether something has failed on the host, so that the other hosts have to act."""
        return self.verdict is not None or any(not exit.completed for _, exit in self.exits)

    @property
    def own_lines(self) -> dict[int, Location]:
        """The lines of the host's ranks, by its own verdict."""
        found = self.verdict.locations if self.verdict is not None else {}
        return {rank: place for rank, place in found.items() if rank in self.ranks}

    def encoded(self, limit_bytes: int) -> bytes:
        """Return the report to be sent; with exits and verdict only if it is too long."""
        packed = pack(self)
        if len(packed) > limit_bytes:
            bare = tuple((at, replace(exit, error=None)) for at, exit in self.exits)
            packed = pack(replace(self, slots={}, exits=bare, errors={}, positions={}))
        return packed


def report_of(
    evidence: Evidence, *, node: int, host: str, seen_at: Mapping[int, float], since_seconds: float = 0.0
) -> HostReport:
    """Return what a host tells of its evidence.

    Args:
        seen_at: when each exit was seen, by rank, in seconds since the epoch.
        since_seconds: how long ago a hang began.
    """
    own = diagnose(evidence)
    hangs = evidence.deadlock is not None or evidence.stall is not None or evidence.outside is not None
    alone = hangs or own.cause is Cause.host_oom or (own.shortage is not None and own.traceback is None)
    return HostReport(
        node=node,
        host=host,
        ranks=tuple(evidence.slots),
        slots=evidence.slots,
        exits=tuple(
            (seen_at.get(one.rank, 0.0), replace(one, error=one.error and _shorter(one.error)))
            for one in evidence.exits
        ),
        errors={rank: _shorter(error) for rank, error in evidence.errors.items()},
        positions=evidence.positions,
        verdict=replace(own, since_seconds=max(own.since_seconds, since_seconds)) if alone else None,
    )


def join(own: Evidence, reports: Sequence[HostReport], lost: Sequence[str]) -> Evidence:
    """Return the evidence of all hosts.

    Args:
        own: evidence of this host, whose report is among the others.
        reports: of all hosts that were heard.
        lost: a sentence for each host that is gone.
    """
    reports = sorted(reports, key=lambda report: report.node)
    seen = sorted(
        ((at, report.node, exit.order, exit) for report in reports for at, exit in report.exits),
        key=lambda one: one[:3],
    )
    verdicts = [report.verdict for report in reports if report.verdict is not None]
    outside = verdicts[0] if verdicts else None
    if outside is not None:  # each host knows the lines of its own ranks best
        own_lines = _merged(report.own_lines for report in reports)
        locations = {**outside.locations, **own_lines}
        place = own_lines.get(-1 if outside.culprit is None else outside.culprit, outside.location)
        outside = replace(outside, locations=locations, location=place)
    return replace(
        own,
        slots=_merged(report.slots for report in reports),
        exits=tuple(replace(one[3], order=order) for order, one in enumerate(seen)),
        errors=_merged(report.errors for report in reports),
        positions=_merged(report.positions for report in reports),
        outside=outside,
        hosts={rank: report.host for report in reports for rank in report.ranks},
        lost_hosts=tuple(lost),
    )


def _merged(parts: Iterable[Mapping[int, Value]]) -> dict[int, Value]:
    return {rank: value for part in parts for rank, value in part.items()}


def _shorter(error: RankError) -> RankError:
    """The error with texts that every host can encode, and no longer than is needed to judge it."""
    chain = tuple(replace(one, message=_told(one.message)) for one in error.chain)
    return replace(error, message=_told(error.message), traceback=_told(error.traceback), chain=chain)


def _told(text: str) -> str:
    """The text, or its beginning and its end."""
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 2 :]}"
    return text.encode(errors="backslashreplace").decode()
