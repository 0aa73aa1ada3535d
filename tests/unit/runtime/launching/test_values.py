"""What a command means: its defaults, the words that belong to the script, and what implies what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.builders.launch_commands import prepare

from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.launching import _values as values


@pytest.mark.parametrize(
    ("text", "on_terminal", "elsewhere"),
    [(None, {0}, {0, 1, 2}), ("none", set(), set()), ("1,0", {0, 1}, {0, 1}), ("all", {0, 1, 2}, {0, 1, 2})],
)
def test_shown_ranks(text: str | None, on_terminal: set[int], elsewhere: set[int]) -> None:
    """Rank 0 on a terminal and all elsewhere, unless ranks are named."""
    assert values.shown_ranks(text, Output.lines, 3) == on_terminal
    for output in (Output.merged, Output.apart):
        assert values.shown_ranks(text, output, 3) == elsewhere


@pytest.mark.parametrize(
    ("redirection", "output"),
    [
        (">out", Output.apart),
        (">out 2>&1", Output.merged),
        (">out 2>err", Output.apart),
        ("| cat", Output.apart),
        ("2>&1 | cat", Output.merged),
        (">&-", Output.lines),
        (">out 2>&-", Output.merged),
    ],
)
def test_the_form_of_the_output_follows_from_where_the_streams_lead(
    tmp_path: Path, redirection: str, output: Output
) -> None:
    """A terminal is asked for by `os.isatty`; nothing else in a test is one."""
    code = "from grpo_run.cli.launching._display import output_form as o; open('form', 'w').write(o().value)"
    subprocess.run(
        f'{sys.executable} -c "{code}" {redirection}', shell=True, cwd=tmp_path, check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "form").read_text() == output.value


def test_staging_areas_are_in_a_folder_of_the_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the given directory; parsing creates nothing of the run's."""
    memory, other = here / "memory", here / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    for root in (memory, other):
        folder = prepare(["--snapshot-dir", str(root), "train.py"]).snapshot_folder
        assert folder == root / f"grpo-run-{os.getuid()}"
        assert list(folder.iterdir()) == []
    assert prepare(["--snapshot-dir", "off", "train.py"]).snapshot_folder is None
    several = prepare(["--snapshot-dir", str(memory), "--nnodes", "2", "train.py"])
    assert several.snapshot_folder == prepare(["--snapshot-dir", str(memory), "train.py"]).snapshot_folder


def test_an_unusable_default_directory_disables_staging(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not exist, or cannot be written; the user did not ask for it, so it is no error."""
    memory = here / "memory"
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    assert prepare(["--snapshot-dir", str(memory), "train.py"]).snapshot_folder is None
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", Path("/proc"))  # no user can create a folder there
    assert prepare(["--snapshot-dir", "/proc", "train.py"]).snapshot_folder is None
