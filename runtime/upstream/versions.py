"""The tested versions of torch, transformers, TRL and accelerate, and the check of what is installed.

Called by `cli` before a launch. Imports none of the libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_run.runtime.errors import UntestedVersionError

DISTRIBUTION = "grpo-run"
"""Name of this project's own distribution, whose requirements are the tested versions."""
CHECKED_LIBRARIES = ("torch", "transformers", "trl", "accelerate")
"""Libraries whose private names are used, so that a version outside the tested range may break a run."""


def tested_versions() -> dict[str, SpecifierSet]:
    """Return the tested version range of each checked library, as this project's own requirements declare it.

    Raises:
        PackageNotFoundError: the project is not installed.
    """
    requirements = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    ranges = {one.name: one.specifier for one in requirements if one.marker is None}
    return {name: ranges[name] for name in CHECKED_LIBRARIES}


def check_versions(*, allow_untested: bool, tested: Mapping[str, SpecifierSet] | None = None) -> list[str]:
    """Compare the installed versions with the tested ranges.

    Args:
        tested: the ranges by library; those of `tested_versions` if not given.

    Returns:
        With `allow_untested`, one sentence for each library outside its range.

    Raises:
        UntestedVersionError: a library is missing, or is outside its range and `allow_untested` is not set.
    """
    outside = []
    for name, range_ in (tested_versions() if tested is None else tested).items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise UntestedVersionError(f"{name} is not installed; install {name}{range_}") from None
        if not range_.contains(installed.split("+")[0], prereleases=True):
            outside.append(f"{name} {installed} is outside the tested range {range_}")
    if outside and not allow_untested:
        raise UntestedVersionError(
            "; ".join(outside) + "; install a tested version, or pass --allow-untested to use this one"
        )
    return outside
