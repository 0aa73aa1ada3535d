"""Caps on generation are parsed, applied and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.hooks import caps


def test_settings_are_parsed_with_their_types() -> None:
    """Integers stay integers."""
    parsed = caps.parse(
        ["max_completion_length=256", "repetition_penalty=1.5", "no_repeat_ngram_size=3", "max_time=30"]
    )
    assert parsed == {
        "max_completion_length": 256, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "max_time": 30.0,
    }  # fmt: skip
    assert [type(value) for value in parsed.values()] == [int, float, int, float]


def test_the_last_setting_of_a_key_wins() -> None:
    """Repeated options behave so on any command line."""
    assert caps.parse(["max_time=1", "max_time=2"]) == {"max_time": 2.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_completion_lenght=5", "did you mean max_completion_length"),
        ("max_length=5", "did you mean max_completion_length|known:"),
        ("zzz=5", "known: max_completion_length, repetition_penalty, no_repeat_ngram_size, max_time"),
        ("max_time", "KEY=VALUE"),
        ("", "KEY=VALUE"),
        ("max_time=soon", "max_time=soon: expected a number"),
        ("max_completion_length=12.5", "max_completion_length=12.5: expected an integer"),
        ("max_completion_length=", "expected an integer"),
        ("max_completion_length=0", "greater than 0"),
        ("max_time=-1", "greater than 0"),
        ("max_time=inf", "finite"),
        ("max_time=nan", "finite"),
    ],
)
def test_a_wrong_setting_is_one_line(setting: str, message: str) -> None:
    """The error names the nearest key, or the expected value."""
    with pytest.raises(ConfigError, match=message) as caught:
        caps.parse([setting])
    assert "\n" not in str(caught.value)


def test_trl_has_the_fields() -> None:
    """Both configuration classes have them, and `generation_kwargs` for the other caps."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    package = find_spec("trl")
    assert package is not None
    assert package.origin is not None
    for name in ("grpo_config.py", "rloo_config.py"):
        tree = ast.parse((Path(package.origin).parent / "trainer" / name).read_text(encoding="utf-8"))
        fields = {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert {*caps.FIELDS, "generation_kwargs", "use_vllm"} <= fields


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
        repetition_penalty: float = 1.0
        generation_kwargs: dict[str, Any] | None = None
        use_vllm: bool = False
        seen: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.seen.append(self.max_completion_length)

    return Config


def record(applied: Applied) -> Callable[..., None]:
    """Return a journal that records the fields."""
    return lambda **fields: applied.append(fields)


def test_caps_are_applied_before_the_configuration_is_validated(config_class: type, applied: Applied) -> None:
    """TRL's own validation then sees the capped values."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(applied))
    config = config_class(max_completion_length=512, generation_kwargs={"do_sample": True})
    assert config.seen == [64]
    assert config.max_completion_length == 64
    assert config.generation_kwargs == {"do_sample": True, "max_time": 2.5}


def test_each_cap_is_journaled_with_the_value_it_replaced(config_class: type, applied: Applied) -> None:
    """No setting of the script changes silently."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(applied))
    config_class()
    assert applied == [
        {"key": "max_completion_length", "old": 1024, "new": 64, "config": "Config"},
        {"key": "max_time", "old": None, "new": 2.5, "config": "Config"},
    ]


def test_the_scripts_dictionary_is_not_modified(config_class: type, applied: Applied) -> None:
    """Several configurations may share it."""
    caps.install(config_class, {"max_time": 2.5}, record(applied))
    mine = {"do_sample": True}
    config_class(generation_kwargs=mine)
    assert mine == {"do_sample": True}


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


def test_a_cap_that_vllm_does_not_support_is_an_error(config_class: type, applied: Applied) -> None:
    """It would have no effect. Caps that are TRL fields are accepted."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(applied))
    with pytest.raises(ConfigError, match=r"max_time.*vLLM"):
        config_class(use_vllm=True)


def trainer(**args: Any) -> Any:
    """Return a trainer with these arguments."""
    return SimpleNamespace(args=SimpleNamespace(**args))


def test_caps_that_took_effect_pass_the_check() -> None:
    """The test covers fields and generation keywords."""
    caps.check(
        trainer(max_completion_length=64, generation_kwargs={"max_time": 2.5}),
        {"max_completion_length": 64, "max_time": 2.5},
    )


@pytest.mark.parametrize(
    "args",
    [
        {"max_completion_length": 512, "generation_kwargs": {"max_time": 2.5}},
        {"max_completion_length": 64, "generation_kwargs": None},
        {"max_completion_length": 64, "generation_kwargs": {"max_time": 9.0}},
    ],
)
def test_a_cap_that_did_not_take_effect_is_an_error(args: dict[str, Any]) -> None:
    """As when the script sets the value again after building the configuration."""
    with pytest.raises(ConfigError, match="did not take effect: SimpleNamespace has"):
        caps.check(trainer(**args), {"max_completion_length": 64, "max_time": 2.5})


def test_a_trainer_that_does_not_generate_is_not_checked() -> None:
    """An SFT trainer may run in the same script."""
    caps.check(trainer(learning_rate=1e-6), {"max_completion_length": 64})
