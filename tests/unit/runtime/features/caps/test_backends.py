"""Caps that a backend cannot apply are refused, and vLLM gets them in its own parameters.

There is no vLLM here: its parameters are tested as they are documented.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._backends import check, vllm_cut, vllm_keywords, vllm_repetition
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import Cut
from grpo_run.watchdog.observation import EndReason

BOTH = CapSettings(repetition=64, max_time=5.0)


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        (
            {"rollout_func": print, "use_vllm": True},
            BOTH,
            "repetition and max_time: what vLLM generates for a `rollout_func` cannot be capped",
        ),
        (
            {"use_transformers_continuous_batching": True},
            BOTH,
            "continuous batching accepts no stopping criteria",
        ),
        ({"use_vllm": True}, BOTH, "max_time: not supported by vLLM"),
        ({"generation_config": SimpleNamespace(num_beams=2)}, BOTH, "beam search"),
    ],
)
def test_a_cap_without_effect_is_refused_in_one_line(
    trainer: dict[str, Any], settings: CapSettings, message: str
) -> None:
    """Before anything is generated."""
    with pytest.raises(ConfigError, match=message) as caught:
        check(SimpleNamespace(**trainer), settings)
    assert "\n" not in str(caught.value)


def test_caps_of_the_length_are_never_refused() -> None:
    """Every backend has a maximum length."""
    check(SimpleNamespace(rollout_func=print, use_vllm=True), CapSettings(counting=True))
    check(SimpleNamespace(use_vllm=True), CapSettings(repetition=64))


@pytest.mark.parametrize("window", [8, 64, 128, 1000])
@pytest.mark.parametrize("period", [1, 2, 5, 31, 32, 33, 50, 64])
def test_vllm_ends_a_loop_of_any_period(window: int, period: int) -> None:
    """It ends a request whose last tokens are `min_count` repetitions of one of the pattern sizes."""
    fields = vllm_repetition(window)
    assert fields["min_pattern_size"] * fields["min_count"] >= window
    looped = (list(range(100, 100 + period)) * 9000)[: 3 * 64 + 64 + 2 * window]
    assert vllm_cut([*range(50), *looped], {1}, window) == Cut(
        length=50 + len(looped), reason=EndReason.repetition
    )
    assert vllm_cut([*range(50), *looped, 1], {1}, window) is None
    assert vllm_cut([*looped, *range(500)], {1}, window) is None


def test_vllm_gets_an_object_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SamplingParams` takes an object of its own, a server its fields."""
    assert vllm_keywords("server", 64) == {"repetition_detection": vllm_repetition(64)}
    module = ModuleType("vllm.sampling_params")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    with pytest.raises(ConfigError, match=r"vLLM 0\.17 or later"):
        vllm_keywords("colocate", 64)
    module.RepetitionDetectionParams = SimpleNamespace  # type: ignore[attr-defined]
    assert vllm_keywords("colocate", 64) == {"repetition_detection": SimpleNamespace(**vllm_repetition(64))}
