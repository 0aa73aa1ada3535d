"""The other hosts of a run, as this host's supervisor sees them: who is heard, and one verdict for all.

    a fault here → own evidence → `join`: report it, wait for the reports of the others → one verdict
    a fault elsewhere → `has_fault` → the same

Called by the supervisor at every poll and by `faults.py` through the incident's context. In a run on one host
there is no exchange, and every method returns at once. Waits at most `ANSWER_SECONDS` for the others, and
only for those that are heard. What it did not hear is missing evidence. Judges nothing
(`watchdog/diagnosis/host_reports.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from grpo_run.runtime.history.host_status import HostStatus, own_status, write_hosts
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.host_exchange import FAULT, MAX_PAYLOAD_BYTES, HostExchange
from grpo_run.runtime.processes.signs_of_life import Answer
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.runtime.supervisor.incident import OpenIncident
from grpo_run.watchdog.diagnosis.fault import Evidence
from grpo_run.watchdog.diagnosis.host_reports import HostReport, join, report_of
from grpo_run.watchdog.json_values import pack, unpack
from grpo_run.watchdog.observation import Slot

ANSWER_SECONDS = 2.0
"""How long the reports of other hosts are waited for."""
SILENT_SECONDS = 1.0
"""A host that was not heard for so long is asked whether it is there, four beats after the last."""
LOOK_SECONDS = 0.1
"""Longest time between two looks at who is heard."""
END_SECONDS = 3.0
"""A request to a store that does not answer takes two."""
SHOW_SECONDS = 1.0
STATUS = "status"
Value = TypeVar("Value")


class OtherHosts:
    """The other hosts of one run.

    Args:
        run: its directory, which gets what is shown of them.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.exchange: HostExchange | None = None
        """Of this attempt; None in a run on one host."""
        self._own = HostStatus(name="")
        self._shown_at = 0.0
        self._joined = False
        self._outside: Mapping[str, str] = {}

    def begin_attempt(self, exchange: HostExchange) -> None:
        """Talk to the hosts of a new attempt. The exchange of the last one ends: all have left it."""
        if self.exchange is not None:
            self.exchange.close(END_SECONDS)
        self.exchange, self._joined, self._shown_at = exchange, False, 0.0

    def end(self) -> None:
        """The run is over."""
        if self.exchange is not None:
            self.exchange.close(END_SECONDS)

    def poll(self, state: str, slots: Mapping[int, Slot | None], now: float) -> None:
        """Tell the other hosts where this one is, and the run directory where they are, once a second."""
        if self.exchange is None or now - self._shown_at < SHOW_SECONDS:
            return
        self._shown_at = now
        self._own = own_status(self.exchange.name, state, slots.items())
        self.exchange.publish(STATUS, pack(self._own))
        write_hosts(self._run.hosts, self.status())

    def show_outside(self, clauses: Mapping[str, str]) -> list[str]:
        """Show hosts that do not take part, and why, by name; return what is new of that."""
        if clauses == self._outside:
            return []
        before, self._outside = self._outside, clauses
        write_hosts(self._run.hosts, self.status())
        return [f"host {name} {why}" for name, why in clauses.items() if before.get(name) != why]

    def status(self) -> tuple[HostStatus, ...]:
        """Return what is shown of every host; empty if there is one only."""
        outside = tuple(HostStatus(name=name, outside=why) for name, why in self._outside.items())
        exchange = self.exchange
        if exchange is None:
            return outside
        told = _unpacked(HostStatus, exchange.latest(STATUS)) | {exchange.node: self._own}
        return outside + tuple(
            replace(
                told.get(node, HostStatus(name=exchange.name_of(node))),
                silent_seconds=None if node == exchange.node else round(exchange.silent_seconds(node), 1),
            )
            for node in range(exchange.nodes)
        )

    @property
    def has_fault(self) -> bool:
        """Whether another host has reported a fault of this attempt."""
        if self.exchange is None or self._joined:
            return False
        return any(report.has_fault for report in self._reports(self.exchange).values())

    def completed(self, attempt: Attempt, slots: Mapping[int, Slot | None]) -> None:
        """Tell the others that the ranks of this host have exited: one that still trains lost its peer."""
        if self.exchange is not None:
            evidence = Evidence(
                slots=slots,
                world_size=attempt.world_size,
                best_position=(0, 0),
                exits=tuple(attempt.exits.seen),
            )
            self._report(self.exchange, evidence, attempt)

    def join(
        self, incident: OpenIncident, attempt: Attempt, finding: HangFinding | None = None
    ) -> OpenIncident:
        """Report the evidence of this host, and return it with that of the others.

        Args:
            incident: with the evidence.
            attempt: in which it happened.
            finding: the hang; None if it is none.
        """
        exchange = self.exchange
        if exchange is None:
            return incident
        self._joined = True
        began_at = finding.began_at_seconds if finding is not None else time.monotonic()
        own = self._report(exchange, incident.evidence, attempt, time.monotonic() - began_at)
        gone, missing = self._await_reports(exchange)
        reports = [own, *self._reports(exchange).values()]
        lost = [f"The supervisor of host {name} is gone, and its ranks with it." for name in gone]
        return replace(
            incident, evidence=join(incident.evidence, reports, lost), missing=[*incident.missing, *missing]
        )

    def _report(
        self, exchange: HostExchange, evidence: Evidence, attempt: Attempt, since_seconds: float = 0.0
    ) -> HostReport:
        report = report_of(
            evidence, node=exchange.node, host=exchange.name, seen_at=attempt.exits.seen_at,
            since_seconds=since_seconds,
        )  # fmt: skip
        told = report.encoded(MAX_PAYLOAD_BYTES)
        exchange.publish(FAULT, told)
        return unpack(HostReport, told)  # what the others judge by

    def _reports(self, exchange: HostExchange) -> dict[int, HostReport]:
        return _unpacked(HostReport, exchange.latest(FAULT))

    def _await_reports(self, exchange: HostExchange) -> tuple[list[str], list[str]]:
        """Wait for the other hosts; return the names of those without a supervisor, and what is missing."""
        deadline = time.monotonic() + ANSWER_SECONDS
        exchange.hurry(ANSWER_SECONDS)
        answers: dict[int, Answer] = {}
        while True:
            told = self._reports(exchange)
            ready = {node for node in told if exchange.has_confirmed(node)} | answers.keys()
            awaited = [node for node in exchange.others if node not in ready]
            remaining = deadline - time.monotonic()
            if not awaited or remaining <= 0:
                break
            answers |= exchange.look_for(
                [node for node in awaited if exchange.silent_seconds(node) > SILENT_SECONDS]
            )
            exchange.wait(min(remaining, LOOK_SECONDS))
        silent = [node for node in exchange.others if node not in told]
        gone = [exchange.name_of(node) for node in silent if answers.get(node) is Answer.refused]
        missing = [
            f"host {exchange.name_of(node)} has not told what it knows; it was heard"
            f" {exchange.silent_seconds(node):.1f} s ago"
            for node in silent
        ]
        return gone, missing


def _unpacked(kind: type[Value], packed: Mapping[int, bytes]) -> dict[int, Value]:
    """What hosts have told; not of one with another version of grpo-run, which counts as not heard."""
    found = {}
    for node, text in packed.items():
        with contextlib.suppress(ValueError):
            found[node] = unpack(kind, text)
    return found
