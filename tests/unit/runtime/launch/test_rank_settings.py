"""What the supervisor tells a rank."""

from __future__ import annotations

from collections.abc import Callable

import pydantic
import pytest

from grpo_run.runtime.launch.rank_settings import VARIABLE, RankSettings

Make = Callable[..., RankSettings]


def test_settings_arrive_as_they_were_sent(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through one environment variable, whole numbers whole."""
    sent = make_settings(
        arguments=("--name", 'fünf "words"\nhere', ""),
        generation={"max_completion_length": 64, "max_time": 2.0},
    )
    for name, value in sent.to_environment().items():
        monkeypatch.setenv(name, value)
    received = RankSettings.from_environment()
    assert received == sent
    assert [type(value) for value in received.generation.values()] == [int, float]


def test_one_variable_carries_all(make_settings: Make) -> None:
    """The script's environment is not littered."""
    assert list(make_settings().to_environment()) == [VARIABLE]


def test_an_unknown_setting_is_our_own_bug(make_settings: Make) -> None:
    """Supervisor and rank are of one version."""
    with pytest.raises(pydantic.ValidationError):
        make_settings(no_such_setting=1)


def test_arguments_that_are_no_utf8_arrive(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name in another encoding is a lone surrogate in `sys.argv`; the script gets the same word."""
    sent = make_settings(arguments=("data-\udcff.json",))
    monkeypatch.setenv(VARIABLE, sent.to_environment()[VARIABLE])
    assert RankSettings.from_environment().arguments == ("data-\udcff.json",)
