"""Which snapshot the ranks of several hosts resume from, and who sends which part of it to whom.

Each host says what its memory has. The newest snapshot is chosen of which every part is on some host, and
each host gets the parts that it lacks, so that all load it from their own memory (`memory.py`). Scheduled
checkpoints that host 0 has lost before they were written to disk are completed there, too. If anything fails,
all ranks load from disk. Called once in an attempt, at the start of its first call. `plan` is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pydantic

from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import from_bits, to_bits
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.parts import Parts, is_on_disk, read_parts
from grpo_run.runtime.snapshots.slot import SnapshotName, StagedSnapshot

if TYPE_CHECKING:
    from grpo_run.runtime.rank.host_link import HostLink

LOCK_SECONDS = 10.0
"""How long a slot may be locked by a process that is ending."""


class Inventory(pydantic.BaseModel):
    """What one host says at the start of an attempt.

    Attributes:
        held: what its memory has of snapshots of this run, by the index of the slot.
        written: indices of slots whose snapshots are on disk.
        from_disk: the supervisor of rank 0 has written the newest snapshot to disk to be loaded from there.
        discarded: (call, step) from which on the run goes back, as the supervisor of rank 0 knows.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    held: dict[int, Parts] = {}
    written: frozenset[int] = frozenset()
    from_disk: bool = False
    discarded: tuple[int, int] | None = None

    def parts(self, name: SnapshotName) -> AbstractSet[int]:
        """Return the parts that the host has of a snapshot."""
        held = self.held.get(name.slot)
        return held.files.keys() if held is not None and held.staged.order == name.order else set()

    def discards(self, staged: StagedSnapshot) -> bool:
        """Whether a snapshot is of the steps that the run goes back over."""
        call, step = self.discarded or (0, 0)
        return staged.train_call.ordinal == call and staged.step >= step


class Transfer(NamedTuple):
    """A part of a snapshot that one host sends to another."""

    name: SnapshotName
    part: int
    source: int
    target: int


def plan(inventories: Sequence[Inventory]) -> tuple[SnapshotName | None, list[Transfer]]:
    """Return the snapshot that all hosts load, and who sends which part of what to whom, in order. Pure.

    It is the newest of which every part is on some host. A part is sent by the first host that has it. Every
    host gets what it lacks of the snapshot. Host 0 gets older ones that have to reach the disk, too, where it
    has nothing else in their slots.

    Args:
        inventories: by the number of the host.
    """
    main, known = inventories[0], dict[SnapshotName, Parts]()
    for inventory in inventories:
        for slot, parts in inventory.held.items():
            known[SnapshotName(slot=slot, order=parts.staged.order)] = parts
    whole = [
        name
        for name, parts in sorted(known.items(), key=lambda entry: entry[0].order, reverse=True)
        if len(set().union(*(one.parts(name) for one in inventories))) == parts.hosts
        and not main.discards(parts.staged)
    ]
    if main.from_disk or not whole:
        return None, []
    moves = [move for host in range(len(inventories)) for move in _moves(inventories, whole[0], host)]
    taken = {whole[0].slot}
    for name in whole[1:]:
        is_written = any(name.slot in one.written and one.parts(name) for one in inventories)
        is_free = name.slot not in taken and (name.slot not in main.held or main.parts(name))
        if known[name].staged.must_reach_disk and is_free and not is_written:
            taken.add(name.slot)
            moves += _moves(inventories, name, 0)
    return whole[0], moves


def _moves(inventories: Sequence[Inventory], name: SnapshotName, target: int) -> Iterator[Transfer]:
    everywhere = set().union(*(one.parts(name) for one in inventories))
    for part in sorted(everywhere - inventories[target].parts(name)):
        source = next(host for host, one in enumerate(inventories) if part in one.parts(name))
        yield Transfer(name, part, source, target)


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What all ranks have agreed on at the start of an attempt.

    Attributes:
        link: of this host to the others.
        attempt: its number in snapshots: higher than in any that a host has.
        name: of the snapshot that every host has complete now; None to load from disk, or nothing.
        takes_snapshots: every host has memory for them.
    """

    link: HostLink
    attempt: int
    name: SnapshotName | None
    takes_snapshots: bool


def recover(session: Session) -> Recovered:
    """Choose a snapshot, and bring all of it to every host. Collective.

    Raises:
        RuntimeError: a host is lost meanwhile.
    """
    from grpo_run.runtime.rank.host_link import HostLink  # imports torch, which the script imports first

    link = HostLink(session)
    votes, inventory, directory = session.votes, Inventory(), session.config.snapshot_directory
    staging = StagingArea(directory) if directory is not None else None
    if staging is not None and session.leads_host:
        inventory = _inventory(session, staging)
    newest = max((parts.staged.attempt for parts in inventory.held.values()), default=-1)
    lacks, any_held, attempt = votes.maxima(
        [int(staging is None), int(bool(inventory.held)), max(session.settings.attempt, newest + 1)]
    )
    name = None
    if any_held and not lacks and staging is not None:
        chosen, failed = None, False
        if session.leads_host:
            texts = link.exchange(inventory.model_dump_json().encode())
            inventories = [Inventory.model_validate_json(text) for text in texts]
            for index, parts in inventory.held.items():
                if inventories[0].discards(parts.staged):  # a later attempt must not find it either
                    with staging.slots[index].locked(LOCK_SECONDS):
                        staging.slots[index].begin_snapshot()
            chosen, failed = _bring(session, staging, link, inventories)
        fields = [0] * 5 if chosen is None else [chosen.slot + 1, *chosen.order[:3], to_bits(chosen.order[3])]
        fails, slot, number, call, step, bits = votes.maxima([int(failed), *fields])
        if slot and not fails:
            name = SnapshotName(slot=slot - 1, order=(number, call, step, from_bits(bits)))
        elif slot:
            text = "the snapshot in memory is not complete on every host"
            session.warn(f"{text}; the newest complete checkpoint on disk is used instead")
    return Recovered(link=link, attempt=attempt, name=name, takes_snapshots=not lacks)


def _inventory(session: Session, staging: StagingArea) -> Inventory:
    found = {slot.index: parts for slot in staging.slots if (parts := read_parts(slot)) is not None}
    run_id, settings = session.config.run_id, session.settings
    return Inventory(
        held={index: parts for index, parts in found.items() if parts.staged.run_id == run_id},
        written=frozenset(slot.index for slot in staging.slots if slot.drained),
        from_disk=settings.loads_from_disk,
        discarded=settings.discarded,
    )


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
