"""Parsing of recipe settings: YAML, `--set` overrides, and validation errors as one line.

Called by `recipe.py`, and by `grpo-run plan` to tell recipes from files of TRL's scripts. Handles YAML and
pydantic's errors; does not know which settings a recipe may contain.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_run.runtime.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_SHOWN_CHARACTERS = 80

_PREFIX = re.compile(r"^(Input|String|List|Dictionary) should (be|have) ")
"""Beginning of pydantic's messages about a value, which the one-line message replaces."""


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: list[Any] = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark
                )
            keys.append(key.value)
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

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
        found = yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    for key in found:
        if not isinstance(key, str) or "." in key:
            raise ConfigError(f"{path}: expected a key without dots, found {key!r}")
    return found


def apply_overrides(
    settings: Mapping[str, Any], overrides: Sequence[str], known: Sequence[str]
) -> dict[str, Any]:
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
        section, _, inner = key.rpartition(".")
        value = _value_of(text, value_text)
        if section:
            present = result.get(section)
            result[section] = {**(present if isinstance(present, dict) else {}), inner: value}
        else:
            result[key] = value
    return result


def origin_of(key: str, overrides: Sequence[str], path: Path) -> str:
    """Return where a key was set: `--set`, or the file."""
    given = {text.partition("=")[0].strip() for text in overrides}
    return "--set" if {key, key.partition(".")[0]} & given else str(path)


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
    invalid: ValidationError, overrides: Sequence[str], path: Path, known: Sequence[str]
) -> ConfigError:
    """Return pydantic's first error as one line: location, key, value, and what is expected."""
    error = invalid.errors(include_url=False)[0]
    parts = [str(part) for part in error["loc"]]
    key = ".".join(parts[:2])
    origin = origin_of(key, overrides, path)
    if error["type"] == "extra_forbidden":
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
