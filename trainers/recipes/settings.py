"""Parsing of recipe settings: YAML with line numbers, `--set` overrides, and validation errors as one line.

Called by `recipe.py` only. Handles YAML and pydantic's errors; does not know which settings a recipe may
contain.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_run.runtime.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_SHOWN_CHARACTERS = 80

_PREFIX = re.compile(r"^(Input|String|List|Dictionary) should (be|have) ")
"""Beginning of pydantic's messages about a value, which the one-line message replaces."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and where it was set: `file:line` or `--set`."""

    value: Any
    origin: str

    @staticmethod
    def values(settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the values as nested mappings, one level per part of a dotted key."""
        nested: dict[str, Any] = {}
        for key, setting in settings.items():
            section, _, inner = key.rpartition(".")
            if section:
                nested.setdefault(section, {})[inner] = setting.value
            else:
                nested[key] = setting.value
        return nested


def read_settings(path: Path) -> dict[str, Setting]:
    """Read a YAML file with two levels into settings with dotted keys.

    Raises:
        ConfigError: the file cannot be read, is not valid YAML, is not a mapping, or has a duplicate key.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {str(path)!r}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_FILE_BYTES} bytes, so it is not a recipe")
    try:
        loader = yaml.SafeLoader(content)
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                found = (
                    "an empty file"
                    if root is None
                    else "a list"
                    if root.tag.endswith(":seq")
                    else "a single value"
                )
                raise ConfigError(f"{path}: expected a mapping of keys to values, found {found}")
            return _settings_of(loader, root, str(path), "")
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None


def _settings_of(
    loader: yaml.SafeLoader, node: yaml.MappingNode, path: str, prefix: str
) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or "." in key:
            raise ConfigError(f"{path}:{line}: expected a key without dots, found {key!r}")
        key = prefix + key
        if key in seen:
            raise ConfigError(f"{path}:{line}: duplicate key {key!r}; it is first set on line {seen[key]}")
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not prefix:
            settings.update(_settings_of(loader, value_node, path, f"{key}."))
        else:
            value = loader.construct_object(value_node, deep=True)
            settings[key] = Setting(value=value, origin=f"{path}:{line}")
    return settings


def apply_overrides(
    settings: Mapping[str, Setting], overrides: Sequence[str], known: Sequence[str]
) -> dict[str, Setting]:
    """Return the settings with `key=value` overrides applied in order.

    A section that is set as a whole replaces its keys, and vice versa, so `sft=null` disables the warm start.

    Raises:
        ConfigError: an override has no `=`, an unknown key, or a list or mapping that is not valid YAML.
    """
    result = dict(settings)
    for text in overrides:
        key, equals, value_text = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {text!r}: expected key=value")
        if key not in known:
            raise ConfigError(f"--set {text!r}: unknown key {key!r}{_nearest(key, known)}")
        result.pop(key.rpartition(".")[0], None)
        for inner in [other for other in result if other.startswith(f"{key}.")]:
            del result[inner]
        result[key] = Setting(value=_value_of(text, value_text), origin="--set")
    return result


def _value_of(text: str, value_text: str) -> Any:
    """Parse lists, mappings and null as YAML.

    Other values stay text, so that `123` or `on` can name a model.
    """
    stripped = value_text.strip()
    if stripped in ("null", "~"):
        return None
    if not stripped.startswith(("[", "{")):
        return stripped
    try:
        return yaml.safe_load(stripped)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or "not a YAML list or mapping"
        raise ConfigError(f"--set {_shown(text)}: {problem}") from None


def validation_error(
    invalid: ValidationError, settings: Mapping[str, Setting], path: str, known: Sequence[str]
) -> ConfigError:
    """Return pydantic's first error as one line: location, key, value, and what is expected."""
    error = invalid.errors(include_url=False)[0]
    parts = [str(part) for part in error["loc"]]
    key = ".".join(parts[:2])
    setting = settings.get(key) or settings.get(parts[0])
    origin = setting.origin if setting else path
    if error["type"] == "extra_forbidden":
        inner = [other for other in settings if other.startswith(f"{key}.")]
        origin = settings[inner[0]].origin if inner else origin
        return ConfigError(f"{origin}: unknown key {key!r}{_nearest(key, known)}")
    if error["type"] == "missing":
        return ConfigError(f"{path}: the key {key!r} is missing")
    expected = _PREFIX.sub("", error["msg"]).partition(", unable to parse")[0]
    if error["type"] in ("model_type", "model_attributes_type"):
        expected = f"a section; set its keys as {key}.KEY=VALUE"
    return ConfigError(f"{origin}: {'.'.join(parts)} = {_shown(error['input'])}, expected {expected}")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return a hint with the nearest known key. A key without a section also matches keys of sections."""
    by_last = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key, known, n=1)
    if not near or key.count(".") != near[0].count("."):
        last = difflib.get_close_matches(key.rpartition(".")[2], list(by_last), n=1)
        near = [by_last[last[0]]] if last else near
    if near:
        return f"; did you mean {near[0]!r}?"
    plain = [name for name in known if "." not in name]
    return f"; available: {', '.join(plain)}, and the dotted keys of sections"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"
