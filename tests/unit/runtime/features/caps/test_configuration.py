"""Caps on generation are applied to a configuration and checked on the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest
import trl

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps import _configuration as caps
from grpo_run.runtime.features.caps._configuration import APPLIED, CapSettings, settings_of
from grpo_run.runtime.features.caps.settings import LENGTH
from grpo_run.runtime.memory.script_settings import OriginalSettings


@pytest.mark.parametrize("kind", [trl.GRPOConfig, trl.RLOOConfig])
def test_trl_has_the_field(kind: Any) -> None:
    """The other caps are our own."""
    assert LENGTH in {one.name for one in fields(kind)}


Applied = list[dict[str, Any]]


@pytest.fixture
def applied() -> Applied:
    """The caps that were journaled."""
    return []


@pytest.fixture
def config_class() -> type:
    """A configuration class that validates itself as TRL's do, and records the value it validated."""

    @dataclass
    class Config:
        max_completion_length: int = 1024
        seen: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.seen.append(self.max_completion_length)

    return Config


def record(applied: Applied) -> Callable[..., None]:
    """Return a journal that records the fields."""
    names = ("key", "old", "new", "config")
    return lambda event: applied.append({name: getattr(event, name) for name in names})


def test_caps_are_applied_before_the_configuration_is_validated(config_class: type, applied: Applied) -> None:
    """TRL's own validation then sees the capped values, and each is journaled with the value it replaced."""
    caps.install(config_class, {"max_completion_length": 64, "repetition": 32}, record(applied))
    config = config_class(max_completion_length=512)
    assert config.seen == [64]
    assert config.max_completion_length == 64
    assert applied == [
        {"key": "max_completion_length", "old": 512, "new": 64, "config": "Config"},
        {"key": "repetition", "old": None, "new": 32, "config": "Config"},
    ]


def test_a_subclass_is_capped_once(config_class: type, applied: Applied) -> None:
    """It may extend `__post_init__`."""
    caps.install(config_class, {"max_completion_length": 64}, record(applied))

    @dataclass
    class Mine(config_class):  # type: ignore[misc]
        extra: int = 0

        def __post_init__(self) -> None:
            self.extra = 1
            super().__post_init__()
            self.extra += self.max_completion_length

    assert Mine().extra == 65
    assert [fields["config"] for fields in applied] == ["Mine"]


def trainer(**args: Any) -> Any:
    """Return a trainer with these arguments."""
    return SimpleNamespace(args=SimpleNamespace(**args))


def test_a_cap_that_took_effect_passes_the_check() -> None:
    """Those of our own are in no configuration."""
    caps.check(trainer(max_completion_length=64), {"max_completion_length": 64, "repetition": 32})


def test_a_cap_that_did_not_take_effect_is_an_error() -> None:
    """As when the script sets the value again after building the configuration."""
    with pytest.raises(ConfigError, match="did not take effect: SimpleNamespace has 512"):
        caps.check(trainer(max_completion_length=512), {"max_completion_length": 64})


def test_completions_that_a_plan_has_shortened_since_the_cap_pass_the_check_and_are_counted() -> None:
    """The cap was in effect where the trainer was built, and the configuration keeps what it was given."""
    args = SimpleNamespace(
        max_completion_length=32, generation_kwargs=None,
        per_device_train_batch_size=1, gradient_accumulation_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    OriginalSettings(
        per_device_train_batch_size=1, gradient_accumulation_steps=1, gradient_checkpointing=False,
        others={"max_completion_length": 64},
    ).keep(args)  # fmt: skip
    caps.check(SimpleNamespace(args=args), {"max_completion_length": 64})
    with pytest.raises(ConfigError, match="SimpleNamespace has 64"):
        caps.check(SimpleNamespace(args=args), {"max_completion_length": 48})
    assert settings_of(SimpleNamespace(args=args), {}) == CapSettings(counting=True)


def test_a_trainer_that_does_not_generate_is_not_checked() -> None:
    """An SFT trainer may run in the same script."""
    caps.check(trainer(learning_rate=1e-6), {"max_completion_length": 64})


def test_caps_of_our_own_leave_the_configuration_as_it_is(config_class: type, applied: Applied) -> None:
    """They act through a stopping criterion, and are journaled like the others."""
    caps.install(config_class, {"repetition": 64, "max_time": 2.5}, record(applied))
    assert config_class() == config_class(max_completion_length=1024)
    assert [(fields["key"], fields["new"]) for fields in applied][:2] == [
        ("repetition", 64),
        ("max_time", 2.5),
    ]
    caps.check(trainer(max_completion_length=9, generation_kwargs=None), {"repetition": 64, "max_time": 2.5})


def test_the_command_line_wins_over_the_script() -> None:
    """A cap that only the script sets is kept."""
    trainer = SimpleNamespace(args=SimpleNamespace(), **{APPLIED: CapSettings(repetition=32, max_time=9.0)})
    assert settings_of(trainer, {"repetition": 64}) == CapSettings(repetition=64, max_time=9.0, counting=True)


def test_nothing_is_capped_unless_asked_for() -> None:
    """Without a cap not even a method of the trainer is wrapped."""
    assert not settings_of(trainer(), {})
    counting = settings_of(trainer(), {"max_completion_length": 9})
    assert counting
    assert not counting.stops


@pytest.mark.parametrize("wrong", [{"repetition": 7}, {"max_time": 0.0}, {"max_time": float("nan")}])
def test_a_cap_of_the_script_is_checked_too(wrong: dict[str, float]) -> None:
    """With the limits of the command line."""
    with pytest.raises(ConfigError):
        CapSettings(**wrong)  # type: ignore[arg-type]
