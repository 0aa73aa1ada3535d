"""Which features need which private names of transformers and TRL, and which of them a release lacks.

`runtime/rank/hooks/attach.py` asks once per `train()` call, when the trainer is known, and warns of each
feature that is off; the code of a feature asks `is_available` and leaves the trainer as it is
where the answer is no. What is in no table is in every supported release, or is looked up with a default.
Recovery, watching and checkpoints need `trainer_names.TRAINER_METHODS` only. The contract tests compare the
table with the symbols of all supported releases. Imports none of the libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from packaging.version import Version

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.upstream import memory_names, trainer_names
from grpo_run.runtime.upstream.trainer_kinds import ROLLOUTS, TRAINERS


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that works only with some releases.

    Attributes:
        text: what is off without the names, as the subject of a sentence.
        needs: by class of the trainer, or "" for any: attributes or methods; `module:name`; or
            `library>=version` for a behaviour that no name shows.
        set_later: attributes that come with the names, and that the trainer sets during `train()`.
    """

    text: str
    needs: Mapping[str, tuple[str, ...]]
    set_later: tuple[str, ...] = field(default=())


def _rollouts(*names: str) -> dict[str, tuple[str, ...]]:
    return {TRAINERS[kind].name: names for kind in ROLLOUTS}


FROM_TOKENS = "trl>=0.29"
"""A turn begins with tokens and returns the completions first, and each row has its own tools."""
EXACT_LOG: Final = Feature(
    text="the exact continuation of loss and speed in log lines after a resume",
    needs={"Trainer": (trainer_names.FINALIZE,)},
    set_later=(trainer_names.PENDING_LOSS, trainer_names.TOTAL_LOSS, trainer_names.LAST_LOGGED_STEP),
)
EXACT_ROLLOUT: Final = Feature(
    text="the exact continuation inside a rollout after a resume",
    needs=_rollouts(trainer_names.MICRO_STEP, trainer_names.BUFFERED_INPUTS, "num_iterations"),
)
LEAVING_ROWS: Final = Feature(
    text="leaving rows of a rollout out of baseline and loss",
    needs=_rollouts(
        trainer_names.GENERATE_AND_SCORE,
        trainer_names.CALCULATE_REWARDS,
        trainer_names.METRICS,
        "trl>=1.6",  # rows of rewards that are all NaN leave the baseline; before, they count as 0
    ),
)
TOOLS: Final = Feature(
    text="naming of tools that hang, and their time limit",
    needs={TRAINERS["grpo"].name: (trainer_names.TOOL_CALLS, FROM_TOKENS)},
    set_later=(trainer_names.SYNC_TOOLS, trainer_names.ASYNC_TOOLS),
)
DIVISION: Final = Feature(
    text="the same update in smaller micro-batches",
    # 0.26 counts each micro-step twice, and generates anew too early
    needs={TRAINERS["rloo"].name: ("trl>=0.27",)},
)
PLAN: Final = Feature(
    text="the prediction of memory",
    needs={
        "": (
            f"{memory_names.KERNEL_MODULE}:{memory_names.HEAD}",
            *(f"{memory_names.KERNEL_MODULE}:{name}" for name in memory_names.TILES),
            f"{memory_names.HEAD_MODULE}:{memory_names.USES_TRITON}",
        )
    },
)
FEATURES: Final = (EXACT_LOG, EXACT_ROLLOUT, TOOLS, DIVISION, PLAN)
"""What the core says is off. What rows leave for, and further ones, the features of a run say (`needs` of
`runtime/rank/points.py`)."""


def is_available(feature: Feature, trainer: Any = None) -> bool:
    """Return whether a feature works with this trainer, or in this process."""
    return next(lacking(feature, trainer), None) is None


def lacking(feature: Feature, trainer: Any = None) -> Iterator[str]:
    """Yield what the installed release lacks of a feature; nothing for a trainer that the feature is not for.

    Args:
        feature: of the table, or of a feature of the run.
        trainer: of transformers or TRL; None for a feature that needs none.
    """
    kinds = {base.__name__ for base in type(trainer).__mro__} | {""}
    for kind in kinds & feature.needs.keys():
        for need in feature.needs[kind]:
            if not _has(need, trainer):
                yield need


def check_available(feature: Feature) -> None:
    """Check a feature that needs no trainer.

    Raises:
        ConfigError: the installed release of TRL lacks a name.
    """
    missing = list(lacking(feature))
    if missing:
        raise ConfigError(
            f"{feature.text} is not possible with trl {version('trl')}, which lacks {missing[0]}"
        )


def off_text(feature: Feature, missing: list[str]) -> str:
    """Return the warning that a feature is off, and for want of what."""
    installed = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers"))
    return f"off: {feature.text}, which needs {', '.join(missing)} (installed: {installed})"


def _has(need: str, trainer: Any) -> bool:
    if ">=" in need:
        library, _, oldest = need.partition(">=")
        return Version(version(library)).release >= Version(oldest).release
    owner, name = trainer, need
    if ":" in need:
        module, _, name = need.partition(":")
        try:
            owner = importlib.import_module(module)
        except ImportError:
            return False
    return hasattr(owner, name)
