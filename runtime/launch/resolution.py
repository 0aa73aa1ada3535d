"""What decides which code a script imports: its import path, and variables that libraries read at import.

Names are resolved with Python's own finder and listings of directories; nothing is imported. A script that
sets such a variable, or imports a library from elsewhere, would run other code as a fork with preloaded
modules than under torchrun. Each rank compares when its script imports the libraries
(`runtime/rank/inherited_modules.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes

Place = tuple[str, ...]
"""Where a top-level module is: its file, or the folders of a package without `__init__.py`; empty if it is
nowhere."""


def place_of(spec: ModuleSpec | None) -> Place:
    """Return where a specification leads. Built-in modules have no place that a path could change."""
    if spec is None:
        return ()
    if spec.origin is not None and spec.has_location:
        return (os.path.realpath(spec.origin),)
    return tuple(os.path.realpath(folder) for folder in spec.submodule_search_locations or ())


def names_provided(entry: str) -> set[str] | None:
    """Return the top-level names that an entry of an import path may provide; None if they cannot be
    listed."""
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


READ_AT_IMPORT = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|DATASETS|TRL|PYTORCH|TORCH|TORCHINDUCTOR|OMP|KMP|MKL|OPENBLAS|GOMP)_\w+"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|DS_\w+|DEEPSPEED_\w+|USE_TORCH|USE_TF|USE_LIBUV"
    r"|XDG_CACHE_HOME|TRACKIO_DIR"
    r"|LD_\w+|PYTHON\w+|ACCELERATE_USE_\w+"
)
"""Variables that Python, torch, transformers, datasets, huggingface_hub, trackio, DeepSpeed or an OpenMP
runtime read at import.
"""
NO_EFFECT_AT_IMPORT = re.compile(r"(PYTHON|LD_)\w+|HF_HUB_ENABLE_HF_TRANSFER|HF_XET_HIGH_PERFORMANCE")
"""Of these, the ones that no import changes anything for. Python and the dynamic loader read theirs before
the first line of a program. huggingface_hub has not used hf_transfer since 1.0, and only reports the other
one, which hf_xet reads when it downloads.
"""


def read_at_import(name: str) -> bool:
    """Whether a library reads this variable at import, so that a script that sets it must do so before."""
    return READ_AT_IMPORT.fullmatch(name) is not None and NO_EFFECT_AT_IMPORT.fullmatch(name) is None


def changes_at_import(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that libraries read at import and that differ between two
    environments."""
    names = sorted({*before, *now})
    return [name for name in names if before.get(name) != now.get(name) and read_at_import(name)]
