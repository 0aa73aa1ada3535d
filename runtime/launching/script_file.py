"""The file that a launch runs, and what is wrong with it before anything is started.

Called by `_configuration.py`, and by `grpo-run plan` for its script. A rank would find the same after
importing torch, twice. Compiles the script, and executes nothing of it.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.watchdog.text import size_text

CONFIG_OPTION = "--config"
"""How scripts with TRL's parser name a YAML file."""
OUTPUT_OPTIONS = ("--output_dir", "--output-dir")
"""How scripts name the directory of their checkpoints."""
LITTLE_ROOM_BYTES = 256 << 20
"""A checkpoint, its optimizer and the run's own files hardly fit into less."""


def source_of(target: str, *, module: bool) -> Path:
    """Return the file that will run.

    Raises:
        UsageError: the script or module does not exist.
    """
    if not module:
        path = Path(target)
        if not path.is_file():
            kind = "is a directory" if path.is_dir() else "does not exist"
            raise UsageError(f"script {target} {kind}; give the path of a Python file, or a module with -m")
        return path
    spec = _find_module(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module(f"{target}.__main__")
    if spec is None or spec.origin is None:
        raise UsageError(
            f"module {target} cannot be found (or has no __main__); is it installed, or did you mean a path?"
        )
    return Path(spec.origin)


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module without importing its parent packages, which would run the user's code in the
    supervisor."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        qualified = ".".join(parts[: depth + 1])
        # the working directory first, as for `python -m`; a plain folder there does not hide an installed
        # package
        spec = importlib.machinery.PathFinder.find_spec(
            qualified, [os.getcwd(), *sys.path] if path is None else path
        )
        for finder in sys.meta_path:
            try:
                spec = spec or finder.find_spec(qualified, path)
            except (ImportError, ValueError):
                continue
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def check_source(path: Path) -> None:
    """Compile a script.

    Raises:
        UsageError: it cannot be read, or Python refuses it.
    """
    if not path.is_file() or path.suffix in importlib.machinery.EXTENSION_SUFFIXES:
        return  # a pipe can be read once
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the rank shows them
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"script {path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        place = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(f"{path}, {place}{type(error).__name__}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"script {path} cannot be compiled: {error}") from None


def check_configs(arguments: Sequence[str]) -> None:
    """Parse the YAML files that a script's arguments name by `--config`.

    Raises:
        UsageError: one is not YAML. A missing one is left to the script.
    """
    for path in map(Path, values_of(arguments, (CONFIG_OPTION,))):
        if path.suffix in (".yaml", ".yml") and path.is_file():
            check_yaml(path)


def check_output_directory(arguments: Sequence[str]) -> list[str]:
    """Try to make a folder where a script's `--output_dir` would be made.

    Returns:
        a warning for each directory whose disk is nearly full. How large a checkpoint will be is unknown, so
        that is no reason to refuse.

    Raises:
        UsageError: nothing can be written there: every save would fail.
    """
    nearly_full = []
    for given in values_of(arguments, OUTPUT_OPTIONS):
        place = Path(os.path.abspath(given))
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".grpo-run-", dir=place))
        except OSError as error:
            raise UsageError(
                f"output directory {given} cannot be written: {place}: {error.strerror}"
            ) from None
        with suppress(OSError):
            free_bytes = shutil.disk_usage(place).free
            if free_bytes < LITTLE_ROOM_BYTES:
                nearly_full.append(
                    f"warning: output directory {given} has {size_text(free_bytes)} free; make room for"
                    " checkpoints"
                )
    return nearly_full


def check_yaml(path: Path) -> None:
    """Parse a YAML file, whatever it contains.

    Raises:
        UsageError: it is not YAML.
    """
    import yaml  # most launches read none

    try:
        for _ in yaml.parse(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise UsageError(f"{path}{place}: {error.problem}") from None
    except (yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path}: {error}") from None


def values_of(arguments: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield what a script's arguments give for some options."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in options and (equals or following):
            yield value if equals else following
