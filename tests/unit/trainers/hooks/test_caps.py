"""Caps on generation: read, laid, and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.hooks import caps


def test_settings_are_read_with_their_types() -> None:
    """Whole numbers stay whole."""
    parsed = caps.parse(
        ["max_completion_length=256", "repetition_penalty=1.5", "no_repeat_ngram_size=3", "max_time=30"]
    )
    assert parsed == {
        "max_completion_length": 256, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "max_time": 30.0,
    }  # fmt: skip
    assert [type(value) for value in parsed.values()] == [int, float, int, float]


def test_the_last_word_counts() -> None:
    """As on every command line."""
    assert caps.parse(["max_time=1", "max_time=2"]) == {"max_time": 2.0}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_completion_lenght=5", "did you mean max_completion_length"),
        ("max_length=5", "did you mean max_completion_length|known:"),
        ("zzz=5", "known: max_completion_length, repetition_penalty, no_repeat_ngram_size, max_time"),
        ("max_time", "KEY=VALUE"),
        ("", "KEY=VALUE"),
        ("max_time=soon", "max_time=soon: wants float"),
        ("max_completion_length=12.5", "max_completion_length=12.5: wants int"),
        ("max_completion_length=", "wants int"),
        ("max_completion_length=0", "above 0"),
        ("max_time=-1", "above 0"),
        ("max_time=inf", "finite"),
        ("max_time=nan", "finite"),
    ],
)
def test_what_is_wrong_is_one_line(setting: str, says: str) -> None:
    """With the nearest name, or what is wanted."""
    with pytest.raises(ConfigError, match=says) as caught:
        caps.parse([setting])
    assert "\n" not in str(caught.value)


def test_the_fields_are_trls() -> None:
    """Both configurations have them, and pass the rest on by `generation_kwargs`."""
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


Laid = list[dict[str, Any]]


@pytest.fixture
def laid() -> Laid:
    """What the journal was told."""
    return []


@pytest.fixture
def config_class() -> type:
    """A configuration that checks itself as TRL's do, and remembers what it saw then."""

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


def record(laid: Laid) -> Callable[..., None]:
    """A journal that keeps what it is told."""
    return lambda **fields: laid.append(fields)


def test_caps_are_laid_before_the_configuration_checks_itself(config_class: type, laid: Laid) -> None:
    """So that its own rules hold for the capped values."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(laid))
    config = config_class(max_completion_length=512, generation_kwargs={"do_sample": True})
    assert config.seen == [64]
    assert config.max_completion_length == 64
    assert config.generation_kwargs == {"do_sample": True, "max_time": 2.5}


def test_every_cap_is_told_with_what_it_replaced(config_class: type, laid: Laid) -> None:
    """Nothing of the script's is changed silently."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(laid))
    config_class()
    assert laid == [
        {"key": "max_completion_length", "old": 1024, "new": 64, "config": "Config"},
        {"key": "max_time", "old": None, "new": 2.5, "config": "Config"},
    ]


def test_the_scripts_own_dictionary_is_not_written_to(config_class: type, laid: Laid) -> None:
    """It may be shared by several configurations."""
    caps.install(config_class, {"max_time": 2.5}, record(laid))
    mine = {"do_sample": True}
    config_class(generation_kwargs=mine)
    assert mine == {"do_sample": True}


def test_a_subclass_is_capped_too(config_class: type, laid: Laid) -> None:
    """Also when it adds checks of its own, before or after those of its parent; and once."""
    caps.install(config_class, {"max_completion_length": 64}, record(laid))

    @dataclass
    class Mine(config_class):  # type: ignore[misc]
        extra: int = 0

        def __post_init__(self) -> None:
            self.extra = 1
            super().__post_init__()
            self.extra += self.max_completion_length

    assert Mine().extra == 65
    assert [fields["config"] for fields in laid] == ["Mine"]


def test_vllm_refuses_what_it_does_not_know(config_class: type, laid: Laid) -> None:
    """A cap that would be dropped is worse than none; the fields of TRL's own it takes."""
    caps.install(config_class, {"max_completion_length": 64, "max_time": 2.5}, record(laid))
    with pytest.raises(ConfigError, match=r"max_time.*vLLM"):
        config_class(use_vllm=True)


def trainer(**args: Any) -> Any:
    """A trainer with these arguments."""
    return SimpleNamespace(args=SimpleNamespace(**args))


def test_caps_that_arrived_are_not_complained_of() -> None:
    """Fields and keywords."""
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
def test_a_cap_that_did_not_arrive_is_found(args: dict[str, Any]) -> None:
    """The script set it again after the configuration was made."""
    with pytest.raises(ConfigError, match="did not reach SimpleNamespace"):
        caps.check(trainer(**args), {"max_completion_length": 64, "max_time": 2.5})


def test_a_trainer_that_does_not_generate_needs_none() -> None:
    """SFT runs in the same script."""
    caps.check(trainer(learning_rate=1e-6), {"max_completion_length": 64})
