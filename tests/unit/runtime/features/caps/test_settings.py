"""Caps are parsed from the command line, recorded, and compared when the run is continued."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps.settings import CapsSettings, parse_caps
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.option import changed_training, given_values
from grpo_run.watchdog.json_values import to_json


def test_settings_are_parsed_with_their_types() -> None:
    """Integers stay integers."""
    parsed = parse_caps(
        [
            "max_completion_length=256",
            "repetition_penalty=1.5",
            "no_repeat_ngram_size=3",
            "max_time=30",
            "repetition=64",
        ]
    )
    assert parsed == {
        "max_completion_length": 256, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "max_time": 30.0,
        "repetition": 64,
    }  # fmt: skip
    assert [type(value) for value in parsed.values()] == [int, float, int, float, int]


def test_the_last_setting_of_a_key_wins() -> None:
    """Repeated options behave so on any command line."""
    assert parse_caps(["max_time=1", "max_time=2"]) == {"max_time": 2.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_completion_lenght=5", "did you mean max_completion_length"),
        ("max_length=5", "did you mean max_completion_length|known:"),
        (
            "zzz=5",
            "known: max_completion_length, repetition_penalty, no_repeat_ngram_size, repetition, max_time",
        ),
        ("max_time", "KEY=VALUE"),
        ("", "KEY=VALUE"),
        ("max_time=soon", "max_time=soon: expected a number"),
        ("max_completion_length=12.5", "max_completion_length=12.5: expected an integer"),
        ("max_completion_length=", "expected an integer"),
        ("max_completion_length=0", "greater than 0"),
        ("max_time=-1", "greater than 0"),
        ("max_time=inf", "finite"),
        ("max_time=nan", "finite"),
        ("repetition=7", "at least 8 tokens"),
        ("repetition=64.5", "expected an integer"),
        ("deadline=5", "did you mean max_time"),
    ],
)
def test_a_wrong_setting_is_one_line(setting: str, message: str) -> None:
    """The error names the nearest key, or the expected value."""
    with pytest.raises(ConfigError, match=message) as caught:
        parse_caps([setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "ends"),
    [("none", ()), ("length,deadline", ("length", "deadline")), (None, ("repetition", "deadline"))],
)
def test_ends_that_leave_the_loss_are_a_list(given: str | None, ends: tuple[str, ...]) -> None:
    """An end that no cap has is an error."""
    assert CapsSettings(**given_values(CapsSettings, {"--mask-capped": given})).masked_ends == ends
    with pytest.raises(ConfigError, match="--mask-capped eos: give none, or some of length, repetition"):
        CapsSettings(masked_ends=("eos",))


def test_ranks_get_the_numbers_that_were_given_and_a_continued_run_is_compared_by_them(
    make_config: Callable[..., RunConfig],
) -> None:
    """`run.json` names them by option and cap, whichever module declares the option."""
    given = CapsSettings(generation={"max_completion_length": 64, "max_time": 2.0})
    config = make_config(features={CapsSettings.NAME: json.loads(json.dumps(to_json(given)))})
    found = config.of(CapsSettings)
    assert found == given
    assert [type(value) for value in found.generation.values()] == [int, float]
    assert {name: str(value) for name, value in changed_training(found).items()} == {
        "--generation max_completion_length": "64", "--generation max_time": "2.0",
    }  # fmt: skip
