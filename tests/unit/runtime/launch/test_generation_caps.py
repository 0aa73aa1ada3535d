"""Caps are parsed from the command line."""

from __future__ import annotations

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch import generation_caps as caps


def test_settings_are_parsed_with_their_types() -> None:
    """Integers stay integers."""
    parsed = caps.parse(
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
    assert caps.parse(["max_time=1", "max_time=2"]) == {"max_time": 2.0}


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
        caps.parse([setting])
    assert "\n" not in str(caught.value)
