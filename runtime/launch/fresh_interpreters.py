"""Why a script's ranks cannot be forks of the interpreter that has imported torch, transformers and TRL already.

A script that sets a variable which these libraries read at import, or that imports one of them from elsewhere, would run
other code as a fork than under torchrun. Called by `cli.launch_options`. Reads syntax only, so that a start is not made
twice: each rank compares again when its script imports the libraries, and starts over if something was not found here
(`trainers.inherited`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from grpo_run.runtime.launch.sources.environment_variables import read_at_import, variables_set
from grpo_run.runtime.launch.sources.import_path import directories_added
from grpo_run.runtime.launch.sources.local_modules import Source
from grpo_run.runtime.launch.sources.resolution import names_provided, place_of

PRELOADED = frozenset(
    (
        "accelerate", "datasets", "deepspeed", "huggingface_hub", "numpy", "pandas", "peft", "pyarrow",
        "safetensors", "tokenizers", "torch", "transformers", "trl",
    )
)  # fmt: skip
"""Libraries that the warm interpreter imports. The ranks know all of its modules; these are worth to look for early."""


def reason_for_fresh_interpreters(sources: Sequence[Source], first_entry: Path) -> str | None:
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
