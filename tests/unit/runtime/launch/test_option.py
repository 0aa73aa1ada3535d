"""A setting is declared once: what is given replaces its default, and what changes training is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.option import OptionGroup, changed_training, given_values, option


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise ConfigError(f"--share {text}: must be from 0 to 1")
    return value


@dataclass(frozen=True, kw_only=True)
class Example:
    """Settings of a feature."""

    NAME: ClassVar[str] = "example"
    count: int = option(3, "--count", group=OptionGroup.run, metavar="N", kind=int, help="how many")
    share: float = option(
        0.5, "--share", group=OptionGroup.training, metavar="S", read=_share, changes_training=True, help=""
    )
    ends: tuple[str, ...] = option(
        ("a",), "--ends", group=OptionGroup.training, metavar="E", changes_training=True, help=""
    )
    caps: dict[str, int] = option(dict, "--caps", group=OptionGroup.run, changes_training=True, help="")
    unasked: int = 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"--count": None, "--share": None, "--other": 1}, {}),
        ({"--count": 0, "--share": "0.25"}, {"count": 0, "share": 0.25}),
    ],
)
def test_only_what_is_given_replaces_a_default(given: dict[str, object], expected: dict[str, object]) -> None:
    """None marks an option that is not on the command line; zero does not."""
    assert given_values(Example, given) == expected


def test_a_wrong_value_is_refused_in_the_words_of_its_declaration() -> None:
    """The user sees them as they are."""
    with pytest.raises(ConfigError, match="--share 2: must be from 0 to 1"):
        given_values(Example, {"--share": "2"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Example(), {}),
        (Example(count=9), {}),
        (Example(share=0.25), {"--share": 0.25}),
        (Example(ends=()), {"--ends": "none"}),
        (Example(ends=("a", "b")), {"--ends": "a,b"}),
        (Example(caps={"x": 1, "y": 2}), {"--caps x": 1, "--caps y": 2}),
    ],
)
def test_what_changes_training_is_known_by_option(settings: Example, expected: dict[str, object]) -> None:
    """A run is not continued with another value unless the user accepts it."""
    assert changed_training(settings) == expected


def test_the_configuration_holds_what_features_are_given() -> None:
    """In `run.json` too; what is not given has its default."""
    plain = RunConfig(
        run_id="r", run_directory=Path("/r"), target="t.py", module=False, arguments=(), command=()
    )
    assert plain.of(Example) == Example()
    config = replace(plain, features={"example": {"share": 0.25, "ends": ["b"]}})
    assert config.of(Example) == Example(share=0.25, ends=("b",))
    assert config.as_json()["features"] == {"example": {"share": 0.25, "ends": ["b"]}}
