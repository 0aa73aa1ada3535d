"""The wheel, built from the source distribution: what an index says about it, and what it brings."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("cli", "dashboards", "runtime", "trainers", "watchdog")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is, but with the installed setuptools."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    return file


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    """An older build's files are not in it, because it is made from the source distribution."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS, "grpo_run"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    expected = {
        name if name.startswith("grpo_run/") else f"grpo_run/{name}"
        for name in listed
        if name and (REPOSITORY / name).is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_metadata_is_valid_and_refuses_no_newer_library(wheel: Path) -> None:
    """An upper bound would make pip refuse what a launch only warns of."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=True)
    needed = [one for one in metadata.requires_dist or () if "dev" not in str(one.marker)]
    assert {"torch", "transformers", "trl"} <= {one.name for one in needed}
    assert [str(one) for one in needed if {spec.operator for spec in one.specifier} - {">="}] == []
    assert set(metadata.provides_extra or ()) >= {"all", "deepspeed", "pages", "peft"}
    assert metadata.description_content_type == "text/markdown"
