"""Which modules an import path provides: where a name resolves, and which names resolve differently under another path.

Called by `fresh_interpreters.py` in the supervisor and by `trainers.inherited` in each rank. Asks Python's own finder, and
lists directories; imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes

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
