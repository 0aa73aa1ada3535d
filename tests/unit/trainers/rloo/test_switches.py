"""Which settings are measured, and their names."""

from __future__ import annotations

from grpo_run.trainers.rloo.switches import METHODS, ONLY_SCORES, ONLY_TEXT, name_of, settings_for


def test_the_grid_has_every_setting_once_after_the_methods() -> None:
    found = settings_for(list(METHODS), grid=True)
    assert len(found) == len(set(found)) == 24
    assert found[:6] == [*METHODS.values(), ONLY_SCORES, ONLY_TEXT]


def test_without_string_there_is_nothing_to_split() -> None:
    assert settings_for(["basic", "lazy"], grid=False) == [METHODS["basic"], METHODS["lazy"]]


def test_a_setting_has_the_name_of_its_method() -> None:
    assert name_of(METHODS["lazy"]) == "lazy"
    assert name_of(ONLY_TEXT) == "text, kept, full"
