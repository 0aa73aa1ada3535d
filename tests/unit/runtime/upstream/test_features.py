"""Features that a release of TRL or transformers lacks the names for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream import features, rollout_names
from grpo_run.runtime.upstream.features import Feature, check_available, is_available, lacking, off_text


class GRPOTrainer:
    """A trainer of an older release."""

    _metrics = "a table"


class OwnTrainer(GRPOTrainer):
    """A script's own."""


NEW = Feature(text="something new", needs={"GRPOTrainer": ("_metrics", "_new"), "": ("json:loads",)})


def test_what_a_trainer_lacks_is_named() -> None:
    assert list(lacking(NEW, OwnTrainer())) == ["_new"]
    assert not is_available(NEW, OwnTrainer())
    assert off_text(NEW, ["_new"]).startswith("off: something new, which needs _new (installed: trl ")


def test_a_feature_is_not_off_for_a_trainer_that_it_is_not_for() -> None:
    assert is_available(NEW, SimpleNamespace())


@pytest.mark.parametrize("need", ["json:no_such_name", "no_such_module:name", "trl>=99.1"])
def test_names_of_modules_and_releases_are_looked_up(need: str) -> None:
    with pytest.raises(ConfigError, match=r"something is not possible with trl .*, which lacks"):
        check_available(Feature(text="something", needs={"": (need,)}))


@pytest.mark.parametrize(
    ("found", "there"), [("1.6.0", True), ("1.6.0.dev0", True), ("1.10.1", True), ("1.5.9", False)]
)
def test_a_release_is_compared_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch, found: str, there: bool
) -> None:
    monkeypatch.setattr(features, "version", lambda name: found)
    assert is_available(Feature(text="something", needs={"": ("trl>=1.6",)})) is there


def test_the_installed_releases_have_everything() -> None:
    """The releases of the tests, as far as no trainer is needed."""
    for feature in features.FEATURES:
        assert is_available(feature)


@pytest.mark.parametrize(
    ("trainer", "tokens"),
    [
        (SimpleNamespace(eos_token_ids=[1, 2], eos_token_id=3), {1, 2}),
        (SimpleNamespace(eos_token_id=3), {3}),
        (SimpleNamespace(_tokenizer=SimpleNamespace(eos_token_id=4)), {4}),
        (SimpleNamespace(), set()),
    ],
)
def test_the_tokens_that_end_a_completion_are_found_in_every_release(trainer: Any, tokens: set[int]) -> None:
    assert rollout_names.end_tokens(trainer) == tokens
