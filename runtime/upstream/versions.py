"""The tested versions of torch, transformers, TRL and accelerate, what is installed, and optional packages.

Called by `cli` before a launch or a plan, by commands that need a package of an extra, and by what records
versions. Installation has lower bounds only (`pyproject.toml`); what works with a version inside them is
found by name, see `features.py`. Imports none of the libraries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from packaging.version import Version

from grpo_run.runtime.errors import MissingPackageError

TESTED: Final[Mapping[str, tuple[str, str]]] = {
    "torch": ("2.10", "2.15"),
    "transformers": ("4.57", "5.24"),
    "trl": ("0.26", "1.16"),
    "accelerate": ("1.12", "1.15"),
}
"""Oldest and newest minor release of each library that runs have been tested with."""


EXTRAS: Final = {"deepspeed": "deepspeed", "peft": "peft"}
"""By module, the extra of this project that installs it."""


def is_installed(module: str) -> bool:
    """Return whether a module could be imported; imports nothing."""
    return find_spec(module) is not None


def check_extra(purpose: str, *modules: str) -> None:
    """Check that the packages of an extra are installed.

    Args:
        purpose: what needs them, as the subject of a sentence.
        modules: keys of `EXTRAS`.

    Raises:
        MissingPackageError: one is not; the line says what to install.
    """
    for module in modules:
        if not is_installed(module):
            raise MissingPackageError(f"{purpose} needs {module}: pip install 'grpo-run[{EXTRAS[module]}]'")


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def untested_versions() -> list[str]:
    """Return one sentence that names each library outside the tested range, or nothing.

    Raises:
        MissingPackageError: one of the libraries is not installed.
    """
    installed, outside = installed_versions(TESTED), []
    for name, (oldest, newest) in TESTED.items():
        if name not in installed:
            raise MissingPackageError(f"{name} is not installed: pip install {name}")
        if not Version(oldest).release <= Version(installed[name]).release[:2] <= Version(newest).release:
            outside.append(f"{name} {installed[name]} (tested: {oldest} to {newest})")
    return [f"not tested with {', '.join(outside)}"] if outside else []
