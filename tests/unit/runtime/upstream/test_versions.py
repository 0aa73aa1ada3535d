"""The comparison of the installed versions with the tested ones."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from grpo_run.runtime.errors import MissingPackageError
from grpo_run.runtime.upstream import versions


def test_the_installed_versions_are_tested() -> None:
    """The test environment itself is inside the ranges."""
    assert versions.untested_versions() == []


@pytest.mark.parametrize("range_", [("0.1", "0.2"), ("99.0", "99.1")])
def test_versions_outside_are_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, range_: tuple[str, str]
) -> None:
    """With the tested range of each."""
    monkeypatch.setattr(versions, "TESTED", {"pytest": range_, "hypothesis": range_})
    tested = f"(tested: {range_[0]} to {range_[1]})"
    assert versions.untested_versions() == [
        f"not tested with pytest {version('pytest')} {tested}, hypothesis {version('hypothesis')} {tested}"
    ]


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that could be imported, but has no metadata."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(MissingPackageError, match="torch is not installed: pip install torch"):
        versions.untested_versions()


@pytest.mark.parametrize(
    ("found", "inside"),
    [
        ("2.13.0+cpu", True), ("2.13.1+cu130", True), ("2.13.0", True), ("2.13.0.dev20260101", True),
        ("2.14.0rc1", False), ("2.14.0", False), ("2.12.9", False),
    ],
)  # fmt: skip
def test_labels_of_a_version_are_ignored(monkeypatch: pytest.MonkeyPatch, found: str, inside: bool) -> None:
    """Torch's wheels name the accelerator in their version."""
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.13", "2.13")})
    monkeypatch.setattr(versions, "version", lambda name: found)
    assert (versions.untested_versions() == []) is inside
