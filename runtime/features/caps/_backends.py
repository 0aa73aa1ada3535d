"""Whether a trainer's backend can apply the caps, and those that vLLM applies itself.

vLLM detects repetitions itself (from version 0.17) and ends a request at its maximum length, but has no time
limit; continuous batching takes no criteria. Called by `_capping.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Sequence
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import Cut
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.features import FROM_TOKENS, Feature
from grpo_run.runtime.upstream.trainer_kinds import TRAINERS
from grpo_run.watchdog.observation import EndReason

CAPS = Feature(
    text="capping of generation by repetition and time, and the reasons why completions end",
    needs={
        TRAINERS["grpo"].name: (
            trainer_names.GENERATE,
            FROM_TOKENS,
            f"{TRAINERS['grpo'].module}:{trainer_names.PARSE_RESPONSE}",
        ),
        TRAINERS["rloo"].name: (trainer_names.GENERATE, FROM_TOKENS),
    },
)
VLLM_LARGEST_PATTERN = 64
VLLM_SMALLEST_PATTERN = VLLM_LARGEST_PATTERN // 2 + 1
"""A loop of a shorter period also has a period between these two, so vLLM, which counts the same number of
repetitions for every period, asks about as many tokens of each."""
VLLM_MIN_COUNT = 3


def check(trainer: Any, settings: CapSettings) -> None:
    """Check that the trainer's backend can apply the caps.

    Raises:
        ConfigError: it cannot; the line says what to do.
    """
    if not settings.stops:
        return
    names = " and ".join(
        name
        for name, value in (("repetition", settings.repetition), ("max_time", settings.max_time))
        if value
    )
    if getattr(trainer, "rollout_func", None) is not None:
        if getattr(trainer, "use_vllm", False):
            raise ConfigError(
                f"--generation {names}: what vLLM generates for a `rollout_func` cannot be capped; remove the"
                " cap, and use grpo_run.trainers.caps in the function"
            )
        return
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise ConfigError(
            f"--generation {names}: continuous batching accepts no stopping criteria; remove the cap,"
            " or set use_transformers_continuous_batching=False"
        )
    if getattr(trainer, "use_vllm", False):
        if settings.max_time is not None:
            raise ConfigError(
                "--generation max_time: not supported by vLLM; remove the cap, or set use_vllm=False."
                " A rollout that does not end is found by the watchdog"
            )
        return
    beams = getattr(getattr(trainer, "generation_config", None), "num_beams", None) or 1
    if beams > 1:
        raise ConfigError(
            f"--generation {names}: not supported with beam search; remove the cap, or set num_beams to 1"
        )


def vllm_repetition(window: int) -> dict[str, int]:
    """Return the fields of vLLM's `RepetitionDetectionParams`.

    Args:
        window: tokens that a loop must have lasted.
    """
    return {
        "max_pattern_size": VLLM_LARGEST_PATTERN,
        "min_pattern_size": VLLM_SMALLEST_PATTERN,
        "min_count": max(VLLM_MIN_COUNT, math.ceil(window / VLLM_SMALLEST_PATTERN)),
    }


def vllm_cut(tokens: Sequence[int], end_tokens: Collection[int], window: int) -> Cut | None:
    """Return where vLLM's detection ended a completion, from its tokens: TRL does not pass the reason on.

    Args:
        tokens: as vLLM returned them.
        end_tokens: the tokens that end a completion by itself.
        window: tokens that a loop must have lasted.
    """
    if not tokens or tokens[-1] in end_tokens:
        return None
    fields = vllm_repetition(window)
    for period in range(fields["min_pattern_size"], fields["max_pattern_size"] + 1):
        last = tokens[-period * fields["min_count"] :]
        if len(last) == period * fields["min_count"] and last[period:] == last[:-period]:
            return Cut(length=len(tokens), reason=EndReason.repetition)
    return None


def vllm_keywords(mode: str, window: int) -> dict[str, Any]:
    """Return what is added to the sampling parameters of vLLM.

    Args:
        mode: `colocate` (an object of vLLM's) or `server` (JSON).
        window: tokens that a loop must have lasted.

    Raises:
        ConfigError: the installed vLLM does not detect repetitions.
    """
    fields = vllm_repetition(window)
    if mode == "server":
        return {"repetition_detection": fields}
    try:
        parameters = importlib.import_module("vllm.sampling_params").RepetitionDetectionParams
    except (ImportError, AttributeError):
        raise ConfigError(
            "--generation repetition: this vLLM does not detect repetitions; install vLLM 0.17 or later,"
            " remove the cap, or set use_vllm=False"
        ) from None
    return {"repetition_detection": parameters(**fields)}
