"""The allocations of a trace in order, and what follows from them: the peak of each phase and what was alive
then.

Written by `_tracker.py`, read by `prediction.py` and `_allocator.py`. Pure: knows neither torch nor the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "rollout")
"""What an allocation holds. `logits` is what the language-model head allocates: its tiles and their
gradients.
"""
PHASES = ("generate", "score", "forward", "backward", "optimizer")
"""Phases of a step that are traced, in order."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """From this event on, a phase of a step.

    Attributes:
        event: index of the first event.
        step: number of the traced step, from 0; -1 before the first.
        phase: one of `PHASES`, or another word for what is not reported.
        window: number of the part of the phase, from 0.
    """

    event: int
    step: int
    phase: str
    window: int = 0


@dataclass(kw_only=True)
class AllocationTimeline:
    """Allocations and frees.

    Attributes:
        sizes: bytes of each allocation, by number.
        kinds: what each allocation holds, by number.
        events: numbers of allocations: `n` when allocation `n` is made, `~n` when it is freed.
        marks: where phases begin.
    """

    sizes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest total within a window of a phase, in bytes, by kind."""

    bytes_by_kind: Mapping[str, float]

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.bytes_by_kind.values())


Weigh = Callable[[int, str], float]
"""Bytes that count for an allocation, from its bytes and its kind: rounding, or the share of one rank."""


def unchanged(size: int, kind: str) -> float:
    """Count an allocation as it is."""
    return size


def peaks(timeline: AllocationTimeline, step: int, weigh: Weigh = unchanged) -> dict[tuple[str, int], Peak]:
    """Return the peak of each phase of a step, by phase and window.

    The tracker begins a window where the language-model head begins and ends. The last window of a phase is
    cut in two halves of equally many events: in the first half of a backward pass the activations of most
    layers are alive, in the second the gradients of most layers. In each window the peak grows linearly with
    the number of layers; the highest of them does not.

    Args:
        timeline: of a trace.
        step: its number.
        weigh: what counts for an allocation.
    """
    found: dict[tuple[str, int], Peak] = {}
    weights = [weigh(size, kind) for size, kind in zip(timeline.sizes, timeline.kinds, strict=True)]
    alive = dict.fromkeys(timeline.kinds, 0.0)
    total = 0.0
    for name, start, end in _windows(timeline, step):
        best, held = total, dict(alive)
        for event in timeline.events[start:end]:
            number = event if event >= 0 else ~event
            change = weights[number] if event >= 0 else -weights[number]
            alive[timeline.kinds[number]] += change
            total += change
            if total > best and name is not None:
                best, held = total, dict(alive)
        if name is not None:
            found[name] = Peak(bytes_by_kind=held)
    return found


def _windows(timeline: AllocationTimeline, step: int) -> Iterator[tuple[tuple[str, int] | None, int, int]]:
    """Yield every part of a timeline, in order and without gaps: its phase and window, None for what is not
    asked for, its first event, and the one after its last.
    """
    following = [*timeline.marks[1:], Mark(event=len(timeline.events), step=-1, phase="")]
    for mark, after in zip(timeline.marks, following, strict=True):
        if mark.step != step or mark.phase not in PHASES:
            yield None, mark.event, after.event
        elif (after.step, after.phase) == (mark.step, mark.phase):
            yield (mark.phase, mark.window), mark.event, after.event
        else:
            middle = (mark.event + after.event) // 2
            yield (mark.phase, mark.window), mark.event, middle
            yield (mark.phase, mark.window + 1), middle, after.event


def highest(windows: Mapping[tuple[str, int], Peak]) -> dict[str, Peak]:
    """Return the higher window of each phase."""
    best: dict[str, Peak] = {}
    for (phase, _), peak in windows.items():
        if phase not in best or peak.total > best[phase].total:
            best[phase] = peak
    return best


def extrapolate(
    few: Mapping[tuple[str, int], Peak], more: Mapping[tuple[str, int], Peak], layers: tuple[int, int, int]
) -> dict[tuple[str, int], Peak]:
    """Return the peaks of a model with more layers, from two traces of the same model with fewer.

    Args:
        few, more: of two traces, by phase and window.
        layers: of the two traces, and wanted.
    """
    first, second, wanted = layers
    share = (wanted - second) / (second - first)
    return {
        key: Peak(
            bytes_by_kind={
                kind: more[key].bytes_by_kind.get(kind, 0.0)
                + share * (more[key].bytes_by_kind.get(kind, 0.0) - few[key].bytes_by_kind.get(kind, 0.0))
                for kind in {*more[key].bytes_by_kind, *few[key].bytes_by_kind}
            }
        )
        for key in more
    }
