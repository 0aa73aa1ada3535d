"""Which snapshot the ranks of several hosts resume from, and who sends which part of it to whom.

Each host says what its memory has. The newest snapshot is chosen of which every part is on some host, and
each host gets the parts that it lacks, so that all load it from their own memory (`memory.py`). Scheduled
checkpoints that host 0 has lost before they were written to disk are completed there, too. If anything fails,
all ranks load from disk. Called once in an attempt, at the start of its first call. `plan` is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pydantic

from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import from_bits, to_bits
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.parts import is_on_disk, read_parts
from grpo_run.runtime.snapshots.slot import SnapshotName

if TYPE_CHECKING:
    from grpo_run.runtime.rank.host_link import HostLink

LOCK_SECONDS = 10.0
"""How long a slot may be locked by a process that is ending."""


class Held(pydantic.BaseModel):
    """What the memory of one host has of a snapshot: some of the parts of so many hosts.

    `required` says that it has to reach the disk, and this host does not know that it has.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    name: SnapshotName
    hosts: int
    parts: frozenset[int]
    required: bool = False


class Inventory(pydantic.BaseModel):
    """What one host says at the start of an attempt.

    Attributes:
        held: the snapshots of this run in its memory.
        from_disk: the supervisor of rank 0 has written the newest snapshot to disk to be loaded from there.
        discarded: (call, step) from which on the run goes back, as the supervisor of rank 0 knows.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    held: tuple[Held, ...] = ()
    from_disk: bool = False
    discarded: tuple[int, int] | None = None

    def is_discarded(self, name: SnapshotName) -> bool:
        """Whether a snapshot is of the steps that the run goes back over."""
        return self.discarded is not None and (
            name.train_call == self.discarded[0] and name.order[2] >= self.discarded[1]
        )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A part of a snapshot that one host sends to another."""

    name: SnapshotName
    part: int
    source: int
    target: int


def complete(inventories: Sequence[Inventory]) -> list[Held]:
    """Return the snapshots of which every part is on some host, newest first. Pure.

    Args:
        inventories: by the number of the host.
    """
    parts: dict[SnapshotName, set[int]] = {}
    found: dict[SnapshotName, Held] = {}
    written = {one.name for inventory in inventories for one in inventory.held if not one.required}
    for inventory in inventories:
        for held in inventory.held:
            if not inventories[0].is_discarded(held.name):
                parts.setdefault(held.name, set()).update(held.parts)
                found[held.name] = held.model_copy(update={"required": held.name not in written})
    whole = [held for name, held in found.items() if len(parts[name]) == held.hosts]
    return sorted(whole, key=lambda held: held.name.order, reverse=True)


def plan(inventories: Sequence[Inventory]) -> tuple[SnapshotName | None, list[Transfer]]:
    """Return the snapshot that all hosts load, and who sends which part of what to whom, in order. Pure.

    A part is sent by the first host that has it. Every host gets what it lacks of the snapshot. Host 0 gets
    older ones that have to reach the disk, too, where it has nothing else in their slots.
    """
    whole = [] if inventories[0].from_disk else complete(inventories)
    if not whole:
        return None, []
    moves = [move for host in range(len(inventories)) for move in _moves(inventories, whole[0], host)]
    taken = {whole[0].name.slot}
    for held in whole[1:]:
        others = {one.name.slot for one in inventories[0].held if one.name != held.name}
        if held.required and held.name.slot not in taken | others:
            taken.add(held.name.slot)
            moves += _moves(inventories, held, 0)
    return whole[0].name, moves


def _moves(inventories: Sequence[Inventory], held: Held, target: int) -> Iterator[Transfer]:
    has = [
        {part for one in inventory.held if one.name == held.name for part in one.parts}
        for inventory in inventories
    ]
    for part in sorted(set(range(held.hosts)) - has[target]):
        source = next(host for host, parts in enumerate(has) if part in parts)
        yield Transfer(name=held.name, part=part, source=source, target=target)


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What all ranks have agreed on at the start of an attempt.

    Attributes:
        attempt: its number in snapshots: higher than in any that a host has.
        name: of the snapshot that every host has complete now; None to load from disk, or nothing.
        takes_snapshots: every host has memory for them.
    """

    attempt: int
    name: SnapshotName | None
    takes_snapshots: bool


def recover(session: Session, staging: StagingArea | None, link: HostLink) -> Recovered:
    """Choose a snapshot, and bring all of it to every host. Collective.

    Args:
        staging: the run's staging area on this host; None if it has none.
        link: to the other hosts.

    Raises:
        RuntimeError: a host is lost meanwhile.
    """
    votes, inventory = session.votes, Inventory()
    if staging is not None and session.leads_host:
        inventory = _inventory(session, staging)
    newest = max((held.name.order[0] for held in inventory.held), default=-1)
    lacks, any_held, attempt = votes.maxima(
        [int(staging is None), int(bool(inventory.held)), max(session.settings.attempt, newest + 1)]
    )
    name = None
    if any_held and not lacks and staging is not None:
        chosen, failed = None, False
        if session.leads_host:
            texts = link.exchange(inventory.model_dump_json().encode())
            inventories = [Inventory.model_validate_json(text) for text in texts]
            _discard(staging, inventories[0])
            chosen, failed = _bring(session, staging, link, inventories)
        fields = [0] * 5 if chosen is None else [chosen.slot + 1, *chosen.order[:3], to_bits(chosen.order[3])]
        fails, slot, number, call, step, bits = votes.maxima([int(failed), *fields])
        if slot and not fails:
            name = SnapshotName(slot=slot - 1, order=(number, call, step, from_bits(bits)))
        elif slot:
            text = "the snapshot in memory is not complete on every host"
            session.warn(f"{text}; the newest complete checkpoint on disk is used instead")
    return Recovered(attempt=attempt, name=name, takes_snapshots=not lacks)


def _inventory(session: Session, staging: StagingArea) -> Inventory:
    settings, held = session.settings, []
    for slot in staging.slots:
        parts = read_parts(slot)
        if parts is not None and parts.staged.run_id == session.config.run_id:
            held.append(
                Held(
                    name=SnapshotName(slot=slot.index, order=parts.staged.order),
                    hosts=parts.hosts,
                    parts=frozenset(parts.files),
                    required=parts.staged.must_reach_disk and not slot.drained,
                )
            )
    return Inventory(
        held=tuple(held),
        from_disk=session.is_main and settings.loads_from_disk,
        discarded=settings.discarded if session.is_main else None,
    )


def _discard(staging: StagingArea, main: Inventory) -> None:
    """Discard what the run goes back over: a later attempt must not find it."""
    for slot in staging.slots:
        parts = read_parts(slot)
        if parts is not None and main.is_discarded(SnapshotName(slot=slot.index, order=parts.staged.order)):
            with slot.locked(LOCK_SECONDS):
                slot.begin_snapshot()


def _bring(
    session: Session, staging: StagingArea, link: HostLink, inventories: Sequence[Inventory]
) -> tuple[SnapshotName | None, bool]:
    """Send and receive what hosts lack. Return the chosen snapshot, and whether this host has failed."""
    chosen, moves = plan(inventories)
    failed = False
    for move in moves:
        slot, taken = staging.slots[move.name.slot], True
        session.slot.record_work()
        if session.host == move.source:
            taken = link.send(move.target, slot, move.part)
        elif session.host == move.target:
            with slot.locked(LOCK_SECONDS) as acquired:
                taken = link.receive(move.source, slot, replace=acquired)
        failed |= not taken and move.name == chosen
    if session.is_main:
        for staged, slot in staging.snapshots():
            if not slot.drained and is_on_disk(staged):
                slot.mark_drained()  # by the host that had rank 0 before
    return chosen, failed
