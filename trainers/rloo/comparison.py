"""What measured settings say: savings, and which part of `string`'s saving is whose.

Used by `grpo-run bench memory`. Pure; reads no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from grpo_run.trainers.rloo.switches import METHODS, ONLY_SCORES, ONLY_TEXT, Switches, all_switches


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one setting needed.

    Attributes:
        peak_bytes: highest number of live bytes; where memory was exhausted, until then.
        peaks: the same by phase.
        series: seconds, live bytes, and phase.
        exhausted: the error, or None if the run finished.
    """

    switches: Switches
    k: int
    peak_bytes: int
    peaks: Mapping[str, int]
    series: Sequence[tuple[float, int, str]]
    exhausted: str | None


def settings_for(methods: Collection[str], *, grid: bool) -> list[Switches]:
    """Return the settings to measure for each k, each once, methods first.

    With both `basic` and `string` there are also the two settings between them.
    """
    between = [ONLY_SCORES, ONLY_TEXT] if {"basic", "string"} <= set(methods) else []
    wanted = [METHODS[name] for name in methods] + between + (list(all_switches()) if grid else [])
    return list(dict.fromkeys(wanted))


def name_of(switches: Switches) -> str:
    """Return the name of a method, or the three switches."""
    return next((name for name, method in METHODS.items() if method == switches), str(switches))


def saving(found: Measurement, base: Measurement) -> float | None:
    """Return by which share a peak is lower; None if one of the runs did not finish."""
    if found.exhausted is not None or base.exhausted is not None:
        return None
    return 1 - found.peak_bytes / base.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Split:
    """The saving of `string` over `basic` in bytes, and what each of its two switches saves alone.

    A switch saves the same alone and after the other one if the two do not interact.
    """

    total: int
    scores_alone: int
    text_alone: int
    scores_after_text: int
    text_after_scores: int


def split_saving(measured: Collection[Measurement], k: int) -> Split | None:
    """Return which part of `string`'s saving is the string and which the scores.

    Returns:
        None if one of the four settings was not measured, or did not finish.
    """
    peaks = {one.switches: one.peak_bytes for one in measured if one.k == k and one.exhausted is None}
    corners = (METHODS["basic"], METHODS["string"], ONLY_SCORES, ONLY_TEXT)
    if any(corner not in peaks for corner in corners):
        return None
    basic, string, scores, text = (peaks[corner] for corner in corners)
    return Split(
        total=basic - string,
        scores_alone=basic - scores,
        text_alone=basic - text,
        scores_after_text=text - string,
        text_after_scores=scores - string,
    )
