"""Ranks at one moment, their deadlines, and the stall that they show: the shell of transcripts."""

from __future__ import annotations

from typing import Any

from grpo_run.watchdog.observation import OpenPhase, Phase, PhaseKey, RankState, Slot
from grpo_run.watchdog.stalls.awaited import find_awaited_rank
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    Occurrence,
    computing_deadline_seconds,
    deadline_seconds,
    frozen_deadline_seconds,
    quiet_deadline_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import NestedPhaseTime, Observed, OpenGenerations, ProcessFacts
from grpo_run.watchdog.stalls.overdue import PhaseClock
from grpo_run.watchdog.stalls.stall import Stall, find_stall
from support.builders.watchdog.slots import make_slot

NOW = 100_000.0
SHORT = Durations.of([0.05] * 21)


def durations_of(text: str) -> Durations | None:
    """Durations such as `80,0.05*1000`, the first one first; None for `none`."""
    if text == "none":
        return None
    values: list[float] = []
    for part in filter(None, text.split(",")):
        seconds, _, times = part.partition("*")
        values += [float(seconds)] * int(times or 1)
    return Durations.of(values)


def key_of(name: str) -> PhaseKey:
    """The phase of this name, or the name of a callback."""
    return Phase[name] if name in Phase.__members__ else name


class StallShell:
    """Ranks that nobody waits for, in phases with deadlines of 8 s, learned from 20 short occurrences."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin again."""
        self.slots: dict[int, Slot | None] = {}
        self.given: dict[str, Any] = {
            "learned": dict.fromkeys(Phase, SHORT), "completed": {}, "processes": {}, "progress": {},
            "waiting": {}, "still": {}, "computing": {}, "connected": {}, "nested": NestedPhaseTime(),
            "generations": OpenGenerations(),
            "exited": [], "settings": DeadlineSettings(floor_seconds=8.0),
        }  # fmt: skip

    def rank(self, number: str, *words: str, process: str = "S", waits: str = "no", completed: str = "all",
             state: str = "training", written: str = "", tokens: str = "", **ago: str) -> None:  # fmt: skip
        """The slot and the process of a rank.

        Args:
            words: open phases with the time since when, as `score:1000`, the outermost first; `unreadable`,
                `exited`, `connected`, `unconnected`, `remote` (a connection to outside).
            waits: `yes`, `no`, or `?` if that is not known.
            completed: phases of this attempt that it has completed.
            state: of the rank.
            written: when it last wrote its slot, seconds ago.
            tokens: passes of its generation, and the most of a rollout: `20/100`.
            ago: `progress`, `computing` and `still`; `heartbeat`, `quiet` and `frozen` of its process.
        """
        rank = int(number)
        phases = tuple(self._open(word) for word in words if ":" in word)
        changes: dict[str, Any] = {"last_progress_seconds": NOW - float(written)} if written else {}
        before: dict[int, Slot | None] = {}
        if tokens:
            passes, limit = map(int, tokens.split("/"))
            changes |= {"generation_passes": 7 + passes, "generation_limit": float(limit)}
            before = {rank: make_slot(rank, phases=phases, generation_passes=7)}
        self.given["generations"] = self.given["generations"].after(before)
        self.slots[rank] = (
            None
            if "unreadable" in words
            else make_slot(rank, phases=phases, state=RankState[state], **changes)
        )
        self.given["completed"][rank] = (
            frozenset(Phase) if completed == "all" else {key_of(one) for one in completed.split(",")}
        )
        if process != "?":
            known = {"connected": True, "unconnected": False}
            self.given["processes"][rank] = ProcessFacts(
                state=process, heartbeat_age_seconds=float(ago.get("heartbeat", 0.2)),
                quiet_seconds=float(ago.get("quiet", 0.0)), frozen_seconds=float(ago.get("frozen", 0.0)),
                connected=next((known[word] for word in words if word in known), None),
            )  # fmt: skip
        if waits != "?":
            self.given["waiting"][rank] = waits == "yes"
        for name in ("progress", "computing"):
            if name in ago:
                self.given[name][rank] = NOW - float(ago[name])
        if "still" in ago:
            self.given["still"][rank] = float(ago["still"])
        if "remote" in words:
            self.given["connected"][rank] = "10.0.0.5:8000"
        if "exited" in words:
            self.given["exited"].append(rank)

    def learned(self, *, ended: str = "", **durations: str) -> None:
        """What phases and callbacks have shown; other phases have shown nothing.

        Args:
            ended: after how many seconds a deadline has ended them.
        """
        found = {key_of(name): durations_of(text) or Durations() for name, text in durations.items()}
        self.given["learned"] = {
            key: one.ended_after(float(ended)) if ended else one for key, one in found.items()
        }

    def callback(self, name: str, durations: str) -> None:
        """What a callback of this name has shown."""
        self.given["learned"][name] = durations_of(durations)

    def settings(self, **changes: str) -> None:
        """The default settings, with these changes."""
        self.given["settings"] = DeadlineSettings(**{name: float(value) for name, value in changes.items()})

    def scan(self, *words: str, now: str = "0") -> None:
        """Scan the slots of rank 0 with these open phases, for the time of inner phases."""
        slots: dict[int, Slot | None] = {0: None}
        if words:
            slots = {0: make_slot(0, phases=tuple(self._open(word) for word in words))}
        self.given["nested"] = self.given["nested"].after(slots, NOW - float(now))

    def look(self, later: str = "0", world: str = "whole") -> str:
        """The stall that these ranks show.

        Args:
            later: how many seconds later.
            world: `more` if some ranks are on another node.
        """
        found = find_stall(self._observed(float(later), world))
        return "nothing" if found is None else self._say(found)

    def awaited(self, later: str = "0", **busy: str) -> str:
        """The rank that others wait for, if every phase may take 300 s.

        Args:
            busy: `r0` and so on, `yes` or `no`: whether the rank computes.
        """

        def clock(slot: Slot) -> PhaseClock:
            since = slot.phases[-1].since_seconds if slot.phases else NOW - 100.0
            return PhaseClock(
                rank=slot.rank, phase=slot.phase or Phase.startup, since_seconds=since,
                silent_seconds=NOW - since, deadline_seconds=300.0, occurrence=Occurrence.later,
                deadline_at_seconds=since + 300.0,
            )  # fmt: skip

        found = find_awaited_rank(
            self._observed(float(later), "whole"),
            clock=clock,
            busy={int(name[1:]): value == "yes" for name, value in busy.items()},
        )
        if found is None:
            return "nobody"
        since, until = NOW - found.since_seconds, found.deadline_at_seconds - NOW
        return (
            f"rank {found.rank} in {found.phase.name} for {since:g} s, until {until:g} s from now,"
            f" busy {found.busy}, waiting {found.waiters}"
        )

    def deadlines(self, phase: str, occurrence: str, shown: str, ended: str = "", **settings: str) -> str:
        """All deadlines of a phase, in seconds.

        Args:
            shown: durations.
            ended: after how many seconds a deadline has ended it.
            settings: changes to the defaults.
        """
        given = DeadlineSettings(**{name: float(value) for name, value in settings.items()})
        durations, here = durations_of(shown), (Phase[phase], Occurrence[occurrence])
        if ended:
            durations = (durations or Durations()).ended_after(float(ended))
        quiet, connected = (
            quiet_deadline_seconds(durations, given, connected=outside) for outside in (False, True)
        )
        return (
            f"{deadline_seconds(here[0], durations, here[1], given):.6g},"
            f" computing {computing_deadline_seconds(here[0], durations, here[1], given):.6g},"
            f" quiet {quiet:.6g}, connected {connected:.6g},"
            f" frozen {frozen_deadline_seconds(durations, given):.6g}"
        )

    def _observed(self, later: float, world: str) -> Observed:
        return Observed(slots=self.slots, now=NOW + later, whole_world=world == "whole", **self.given)

    @staticmethod
    def _open(word: str) -> OpenPhase:
        name, _, ago = word.partition(":")
        if name in Phase.__members__:
            return OpenPhase(phase=Phase[name], since_seconds=NOW - float(ago))
        return OpenPhase(phase=Phase.callback, since_seconds=NOW - float(ago), callback=name)

    @staticmethod
    def _say(stall: Stall) -> str:
        times = f"{stall.waited_seconds:.6g} s of {stall.deadline_seconds:.6g} s"
        times += ", uninterruptible" * stall.uninterruptible
        place = stall.callback or stall.phase.name
        lines = [
            f"{stall.cause} by {stall.culprits}, waiting {stall.waiters}, in {place}, {times}",
            stall.sentence,
            *(f"{rank} alone: {one.sentence} waiting {one.waiters}" for rank, one in stall.alone.items()),
        ]
        return "\n".join(lines)
