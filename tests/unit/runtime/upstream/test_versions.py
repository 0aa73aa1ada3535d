"""The check of the installed versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.specifiers import SpecifierSet

from grpo_run.runtime.errors import UntestedVersionError
from grpo_run.runtime.upstream import versions


def test_the_installed_versions_are_tested() -> None:
    """The test environment itself is inside the ranges."""
    assert versions.check_versions(allow_untested=False) == []


def test_each_checked_library_has_a_bounded_range() -> None:
    """The ranges come from the project's requirements.

    A missing upper bound would admit untested releases.
    """
    tested = versions.tested_versions()
    assert tuple(tested) == versions.CHECKED_LIBRARIES
    for range_ in tested.values():
        assert {one.operator for one in range_} == {">=", "<"}


@pytest.mark.parametrize("range_", [">=1,<2", "<0.1"])
def test_a_version_outside_the_range_is_rejected(range_: str) -> None:
    """The error names the installed version, the tested range and the option that allows it."""
    with pytest.raises(UntestedVersionError, match=f"pytest {version('pytest')}.*--allow-untested"):
        versions.check_versions(allow_untested=False, tested={"pytest": SpecifierSet(range_)})


def test_an_allowed_version_outside_the_range_is_reported() -> None:
    """One sentence per library."""
    (sentence,) = versions.check_versions(allow_untested=True, tested={"pytest": SpecifierSet("<0.1")})
    assert sentence == f"pytest {version('pytest')} is outside the tested range <0.1"


def test_a_missing_library_is_always_rejected() -> None:
    """Allowing untested versions does not help."""
    with pytest.raises(UntestedVersionError, match="not installed; install no-such-library"):
        versions.check_versions(allow_untested=True, tested={"no-such-library": SpecifierSet(">=1")})


@pytest.mark.parametrize(
    ("found", "inside"),
    [("2.13.0+cpu", True), ("2.13.1+cu130", True), ("2.13.0", True), ("2.14.0", False), ("2.12.9", False)],
)
def test_a_local_version_label_is_ignored(monkeypatch: pytest.MonkeyPatch, found: str, inside: bool) -> None:
    """Torch's wheels name the accelerator in their version."""
    monkeypatch.setattr(versions, "version", lambda name: found)
    outside = versions.check_versions(
        allow_untested=True, tested={"torch": versions.tested_versions()["torch"]}
    )
    assert (outside == []) is inside


def test_the_check_reads_metadata_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without metadata is missing, even if it could be imported."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(UntestedVersionError, match="not installed"):
        versions.check_versions(allow_untested=False)
