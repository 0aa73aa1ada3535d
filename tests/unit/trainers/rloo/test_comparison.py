"""Which settings are measured, and what their peaks say."""

from __future__ import annotations

import pytest

from grpo_run.trainers.rloo.comparison import Measurement, name_of, saving, settings_for, split_saving
from grpo_run.trainers.rloo.switches import METHODS, ONLY_SCORES, ONLY_TEXT, Switches


def measured(switches: Switches, peak_bytes: int, *, exhausted: str | None = None) -> Measurement:
    """A measurement with k = 2."""
    return Measurement(
        switches=switches, k=2, peak_bytes=peak_bytes, peaks={}, series=(), exhausted=exhausted
    )


def test_the_grid_has_every_setting_once_after_the_methods() -> None:
    found = settings_for(list(METHODS), grid=True)
    assert len(found) == len(set(found)) == 24
    assert found[:6] == [*METHODS.values(), ONLY_SCORES, ONLY_TEXT]


def test_without_string_there_is_nothing_to_split() -> None:
    assert settings_for(["basic", "lazy"], grid=False) == [METHODS["basic"], METHODS["lazy"]]


def test_a_saving_is_a_share_of_the_peak_and_needs_two_finished_runs() -> None:
    basic, string = measured(METHODS["basic"], 1000), measured(METHODS["string"], 600)
    assert saving(string, basic) == pytest.approx(0.4)
    assert saving(measured(METHODS["string"], 600, exhausted="why"), basic) is None
    assert saving(string, measured(METHODS["basic"], 1000, exhausted="why")) is None


def test_the_saving_of_string_is_split_between_its_two_switches() -> None:
    corners = [
        measured(METHODS["basic"], 1000), measured(METHODS["string"], 550), measured(ONLY_SCORES, 600),
        measured(ONLY_TEXT, 980),
    ]  # fmt: skip
    split = split_saving(corners, 2)
    assert split is not None
    assert (split.total, split.scores_alone, split.text_alone) == (450, 400, 20)
    assert (split.scores_after_text, split.text_after_scores) == (430, 50)
    assert split_saving(corners[:3], 2) is None
    assert split_saving(corners, 4) is None


def test_a_setting_has_the_name_of_its_method() -> None:
    assert name_of(METHODS["lazy"]) == "lazy"
    assert name_of(ONLY_TEXT) == "text, kept, full"
