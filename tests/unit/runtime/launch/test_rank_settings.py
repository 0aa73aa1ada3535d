"""The settings of a rank and their encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pydantic
import pytest

from grpo_run.runtime.launch.config import Budget, Timeouts
from grpo_run.runtime.launch.rank_settings import VARIABLE, RankSettings
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

Make = Callable[..., RankSettings]


def test_settings_survive_the_environment_variable(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers stay integers."""
    sent = make_settings(
        arguments=("--name", 'fünf "words"\nhere', ""), features={"one": {"tokens": 64, "seconds": 2.0}}
    )
    for name, value in sent.to_environment().items():
        monkeypatch.setenv(name, value)
    received = RankSettings.from_environment()
    assert received == sent
    assert [type(value) for value in received.features["one"].values()] == [int, float]


def test_one_variable_carries_all_settings(make_settings: Make) -> None:
    """No other variable is added to the script's environment."""
    assert list(make_settings().to_environment()) == [VARIABLE]


def test_an_unknown_setting_is_refused(make_settings: Make) -> None:
    """Supervisor and rank have the same version."""
    with pytest.raises(pydantic.ValidationError):
        RankSettings(**{**make_settings().model_dump(), "no_such_setting": 1})


def test_arguments_that_are_not_utf8_survive(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name in another encoding is a lone surrogate in `sys.argv`."""
    sent = make_settings(arguments=("data-\udcff.json",))
    monkeypatch.setenv(VARIABLE, sent.to_environment()[VARIABLE])
    assert RankSettings.from_environment().config.arguments == ("data-\udcff.json",)


def test_the_whole_configuration_is_carried_without_the_environment(
    make_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has its environment variables already."""
    sent = make_settings(
        environment={"HF_TOKEN": "hf_secret"}, budget=Budget(failures_without_progress=7),
        timeouts=Timeouts(vote_seconds=20.0),
        deadlines=DeadlineSettings(floor_seconds=3.0, ceiling_seconds=90.0),
        features={"injections": {"inject": ["hang@rank1:step7"]}}, snapshot_directory=Path("/dev/shm/x"),
        snapshot_every=5,
        resume_from="other", shown_ranks=frozenset({1, 0}),
    )  # fmt: skip
    text = sent.to_environment()[VARIABLE]
    assert "hf_secret" not in text
    monkeypatch.setenv(VARIABLE, text)
    assert RankSettings.from_environment().config == replace(sent.config, environment={})
