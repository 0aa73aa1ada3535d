"""The trainers of transformers and TRL that are known, and where their classes are: the only list of them.

Used by the hooks, features and rollouts in a rank, by `runtime/planning/`, and by `features.py`.
Classes are recognized by module and name, so nothing is imported. Contains names, and what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

TrainerKind = Literal["grpo", "rloo", "sft", "transformers", "other"]
"""Whose loss it is: that of a trainer of TRL, of `transformers.Trainer`, or another."""


class KnownTrainer(NamedTuple):
    """A trainer of a library, and the configuration that it takes: modules and names of the two classes."""

    kind: TrainerKind
    module: str
    name: str
    configuration_module: str
    configuration: str


_KNOWN: Final = (
    KnownTrainer("grpo", "trl.trainer.grpo_trainer", "GRPOTrainer", "trl.trainer.grpo_config", "GRPOConfig"),
    KnownTrainer("rloo", "trl.trainer.rloo_trainer", "RLOOTrainer", "trl.trainer.rloo_config", "RLOOConfig"),
    KnownTrainer("sft", "trl.trainer.sft_trainer", "SFTTrainer", "trl.trainer.sft_config", "SFTConfig"),
    KnownTrainer(
        "transformers", "transformers.trainer", "Trainer", "transformers.training_args", "TrainingArguments"
    ),
)
TRAINERS: Final[Mapping[str, KnownTrainer]] = {one.kind: one for one in _KNOWN}
"""By kind."""
ROLLOUTS: Final = ("grpo", "rloo")
"""Kinds that generate. Other trainers of TRL have methods of the same names that do something else."""
_TRAINER_KINDS: Final = {(one.module, one.name): one.kind for one in _KNOWN}
_CONFIGURATION_KINDS: Final = {(one.configuration_module, one.configuration): one.kind for one in _KNOWN}


def trainer_kind(trainer_class: type) -> tuple[TrainerKind, type | None]:
    """Return the kind of a trainer's class, and the library's class that it is or derives from."""
    return _first(trainer_class, _TRAINER_KINDS)


def configuration_kind(configuration_class: type) -> TrainerKind:
    """Return of which kind of trainer a class is a configuration."""
    return _first(configuration_class, _CONFIGURATION_KINDS)[0]


def generates_rollouts(trainer: Any) -> bool:
    """Whether a trainer is GRPO's or RLOO's, or a subclass."""
    return any(
        _TRAINER_KINDS.get((base.__module__, base.__name__)) in ROLLOUTS for base in type(trainer).__mro__
    )


def _first(one: type, known: Mapping[tuple[str, str], TrainerKind]) -> tuple[TrainerKind, type | None]:
    """Return the kind of the first known class, and that class, in the order in which names are looked up.

    A class of TRL that is not known is none of transformers as it is.
    """
    for base in one.__mro__:
        kind = known.get((base.__module__, base.__name__))
        if kind is not None:
            return kind, base
        if f"{base.__module__}.".startswith("trl."):
            break
    return "other", None
