"""Options of a launch, declared with the settings that they set: one place for name, type, default and help.

A setting is a field of a frozen dataclass, made with `option`; its default is the field's. The command line
(`cli.launching.options`), `run.json`, what ranks are told and the reference of options are all made of the
fields. Settings of the core are in `config.py`, those of a feature in its module of settings. Parses no
command line and decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")
KEY = "option"
"""Of a field's metadata."""


class OptionGroup(str, enum.Enum):
    """The groups of the help, in its order."""

    run = "run"
    training = "checkpoints and training"
    limits = "hang detection and time limits (seconds)"
    display = "display"
    injection = "fault injection"


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a setting is given on the command line.

    Attributes:
        name: with dashes.
        group: of the help.
        help: what it does. `(default: ...)` is appended, unless the text has it or the option is a switch.
        metavar: name of the value; "" for a switch, which sets the opposite of the default.
        kind: type of one value on the command line.
        read: makes the setting of what was given: of one value, or of the list of values if `repeated`.
            Raises `ConfigError`.
        repeated: may be given several times.
        choices: the only values, if they are few.
        most_used: `-h` shows it.
        changes_training: a run is not continued with another value unless the user accepts that.
        listed: returns the text that the value `help` prints; None if it is a value as any other.
    """

    name: str
    group: OptionGroup
    help: str
    metavar: str = ""
    kind: type = str
    read: Callable[[Any], Any] | None = None
    repeated: bool = False
    choices: tuple[str, ...] = ()
    most_used: bool = False
    changes_training: bool = False
    listed: Callable[[], str] | None = None


def option(default: Any, name: str, *, repr: bool = True, **attributes: Any) -> Any:
    """Declare a field of settings that an option sets.

    Args:
        default: of the field; a function that makes it for a value that can change.
        name: of the option.
        repr: as of `dataclasses.field`.
        attributes: of `Option`.
    """
    metadata = {KEY: Option(name=name, **attributes)}
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, repr=repr, metadata=metadata)


def options_of(settings: type) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a class of settings that have an option, with it, as they are declared."""
    for one in fields(settings):
        if KEY in one.metadata:
            yield one, one.metadata[KEY]


def default_of(one: Field[Any]) -> Any:
    """Return the default of a field that has an option."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def given_values(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a class of settings that the user has set.

    Args:
        given: values of the command line by the option's name; None for one that was not given.

    Raises:
        ConfigError: a value is wrong.
    """
    return {
        one.name: value if declared.read is None else declared.read(value)
        for one, declared in options_of(settings)
        if (value := given.get(declared.name)) is not None
    }


def changed_training(*settings: object) -> dict[str, object]:
    """Return the values that change training and are not the defaults, by option; a mapping's by its keys."""
    changed: dict[str, object] = {}
    for one in settings:
        for declared, found in options_of(type(one)):
            value = getattr(one, declared.name)
            if not found.changes_training or value == default_of(declared):
                continue
            if isinstance(value, Mapping):
                changed |= {f"{found.name} {key}": item for key, item in value.items()}
            else:
                changed[found.name] = (",".join(value) or "none") if isinstance(value, tuple) else value
    return changed
