"""Where an import path leads a module name, and why a script's ranks need fresh interpreters.

Names are resolved with Python's own finder and listings of directories; nothing is imported. A script that
sets a variable which torch, transformers or TRL reads at import, or that imports one of them from
elsewhere, would run other code as a fork with preloaded modules than under torchrun: its ranks need fresh
interpreters.

`cli/launch_options/parse.py` asks before ranks start. It reads syntax only, to avoid starting twice; each
rank compares again when its script imports the libraries, and starts over if something was missed
(`runtime/rank/inherited_modules.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from pathlib import Path

from grpo_run.runtime.launch.sources import ScriptSource, directories_added, read_at_import, variables_set

Place = tuple[str, ...]
"""Where a top-level module is: its file, or the folders of a package without `__init__.py`; empty if it is nowhere."""


def place_of(spec: ModuleSpec | None) -> Place:
    """Return where a specification leads. Built-in modules have no place that a path could change."""
    if spec is None:
        return ()
    if spec.origin is not None and spec.has_location:
        return (os.path.realpath(spec.origin),)
    return tuple(os.path.realpath(folder) for folder in spec.submodule_search_locations or ())


def names_provided(entry: str) -> set[str] | None:
    """Return the top-level names that an entry of an import path may provide; None if they cannot be listed."""
    suffixes = tuple(all_suffixes())
    names = set()
    try:
        with os.scandir(entry or ".") as listing:
            for item in listing:
                stem = item.name.partition(".")[0]
                if stem.isidentifier() and (item.name == stem or item.name.endswith(suffixes)):
                    names.add(stem)
    except FileNotFoundError:
        return set()
    except OSError:
        return None  # a zip file, or a directory that cannot be read
    return names


def resolves_elsewhere(
    places: Mapping[str, Place], path: Sequence[str], before: Sequence[str]
) -> Iterator[tuple[str, Place]]:
    """Yield the names that lead elsewhere under an import path than they did under another, and where.

    Args:
        places: where each name led; empty for one that was not found.
        path: the import path now.
        before: the import path under which they were found.
    """
    for name in sorted(_candidates(places.keys(), path, before)):
        place = place_of(PathFinder.find_spec(name, list(path)))
        if place and place != places[name]:
            yield name, place


def _candidates(names: Iterable[str], path: Sequence[str], before: Sequence[str]) -> set[str]:
    """The names that may lead elsewhere: all of them if known entries have changed places."""
    known = list(dict.fromkeys(before))
    now = list(dict.fromkeys(path))
    added = [entry for entry in now if entry not in known]
    provided = [names_provided(entry) for entry in added]
    if [entry for entry in now if entry in known] != known or None in provided:
        return set(names)
    return set(names).intersection(set().union(*(found for found in provided if found is not None)))


PRELOADED = frozenset(
    (
        "accelerate", "datasets", "deepspeed", "huggingface_hub", "numpy", "pandas", "peft", "pyarrow",
        "safetensors", "tokenizers", "torch", "transformers", "trl",
    )
)  # fmt: skip
"""Libraries that the warm interpreter imports. The ranks know all of its modules; these are worth to look for early."""


def reason_for_fresh_interpreters(sources: Sequence[ScriptSource], first_entry: Path) -> str | None:
    """Return why ranks must be fresh interpreters, as a part of a sentence; None if they may be forks.

    Args:
        sources: the script and its local modules, the script first.
        first_entry: the directory that Python puts first on `sys.path`: the script's, or the working directory with `-m`.
    """
    for source in sources:
        names = sorted(name for name in variables_set(source.nodes) if read_at_import(name))
        if names:
            return f"{source.path.name} sets {', '.join(names)}"
    added = [entry for source in sources for entry in directories_added(source.nodes, source.path)]
    for entry in [str(first_entry), *added]:
        for name in sorted((names_provided(entry) or set()) & PRELOADED):
            place = _place_in(name, [entry])
            if place and place != _place_in(name, sys.path[1:]):
                return f"{sources[0].path.name} would import {name} from {os.path.dirname(place[0])}"
    return None


def _place_in(name: str, path: Sequence[str]) -> tuple[str, ...]:
    """Where a name leads under a path. A folder without `__init__.py` does not count: an installed package is preferred."""
    spec = PathFinder.find_spec(name, list(path))
    return () if spec is None or spec.origin is None else place_of(spec)
