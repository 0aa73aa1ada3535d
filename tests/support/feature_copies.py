"""Copies of the product with one feature less or more, to be imported and run instead of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.util import cache_from_source
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("cli", "dashboards", "grpo_run", "runtime", "trainers", "watchdog")
FEATURES = Path("grpo_run", "runtime", "features")


def copy_product(folder: Path, *, without: str = "") -> Path:
    """Copy what git has of the product; return the folder to put on Python's path.

    With what Python has compiled of it, which it takes if the time of the source is the same: compiling
    takes longer than all else that most tests of a copy do.

    Args:
        without: name of a feature whose folder is left out.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for file in listed:
        left_out = without and file.startswith(f"runtime/features/{without}/")
        if left_out or not (REPOSITORY / file).is_file():
            continue
        copied = folder / (file if file.startswith("grpo_run/") else f"grpo_run/{file}")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / file, copied)
        if file.endswith(".py") and (compiled := Path(cache_from_source(str(REPOSITORY / file)))).is_file():
            cached = Path(cache_from_source(str(copied)))
            cached.parent.mkdir(exist_ok=True)
            shutil.copyfile(compiled, cached)
    return folder


def _change_table(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change the words of `FEATURES`, and what is imported for them."""
    table = folder / FEATURES / "__init__.py"
    text = table.read_text()
    for pattern, form in (
        (r"^from grpo_run\.runtime\.features import (?:\(([^)]*)\)|([^\n]*))\n", "{}\n"),
        (r"(?<=^FEATURES: tuple\[ModuleType, \.\.\.\] = )\(([^)]*)()\)", "({})"),
    ):
        (found,) = re.finditer(pattern, text, re.MULTILINE)
        words = change(re.findall(r"\w+", found[1] or found[2]))
        listed = "".join(f"{word}, " for word in words)
        if form == "{}\n" and words:
            listed = f"from grpo_run.runtime.features import ({listed})"
        text = text[: found.start()] + form.format(listed) + text[found.end() :]
    table.write_text(text)


def copy_without(name: str, folder: Path) -> Path:
    """Copy the product without a feature: its folder, and its word in `FEATURES`."""
    copy_product(folder, without=name)
    _change_table(folder, lambda words: [word for word in words if word != name])
    return folder


def add_feature(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Add a feature to a copy: its files, and its word in `FEATURES`."""
    room = folder / FEATURES / name
    room.mkdir()
    for file, text in files.items():
        (room / file).write_text(text)
    _change_table(folder, lambda words: [*words, name])
