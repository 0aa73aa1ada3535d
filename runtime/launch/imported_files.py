"""The user's files that a rank has imported, with their digests, in `imports.json` of the run directory.

The first rank of a node writes the file before its first step, and again when the script ends or imports more
(`runtime/rank/session.py`). The next launch, and the supervisor before each attempt, compare the digests with
the files as they are then (`inputs.py`). Files of Python, of installed packages and of grpo-run are not
recorded. A file that is executed without being imported, and data that the script reads, are not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from grpo_run.runtime.files import write_json

MAX_FILES = 500
"""Files beyond this number are not recorded."""
MAX_FILE_BYTES = 16 << 20
"""Larger files are data, not code or configuration, and are not read."""
OWN_PACKAGE = "grpo_run"
NO_FILES_OF_USER = frozenset({OWN_PACKAGE, *sys.stdlib_module_names})
INSTALLED = ("/site-packages/", "/dist-packages/")
"""Part of the path of every installed package, in this environment and in others."""


class ImportedFiles:
    """The record of one rank in one attempt. A file has the digest that it had when it was first seen.

    Args:
        path: of the record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._base = Path.cwd()  # before the script can change it
        self._seen: set[Path] = set()
        self._digests: dict[str, str] = {}

    def update(self, modules: Mapping[str, ModuleType]) -> None:
        """Add the files of modules that were imported since the last call, and write the record if it has
        changed.

        Args:
            modules: as `sys.modules` holds them.

        Raises:
            OSError: the record cannot be written.
        """
        new = [path for path in files_of_user(modules) if path not in self._seen]
        new = new[: MAX_FILES - len(self._digests)]
        self._seen.update(new)
        read = digests(new, self._base)
        if read:
            self._digests |= read
            write_json(self._path, self._digests, durable=False)


def files_of_user(modules: Mapping[str, ModuleType]) -> list[Path]:
    """Return the files of modules that belong neither to Python, nor to an installed package, nor to
    grpo-run."""
    python = tuple(
        os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in ("stdlib", "platstdlib")
    )
    found: dict[Path, None] = {}
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in NO_FILES_OF_USER or _is_installed(file):
            continue
        path = os.path.realpath(file)
        if not _is_installed(path) and not path.startswith(python):
            found[Path(path)] = None
    return list(found)


def _is_installed(file: str) -> bool:
    return any(part in file for part in INSTALLED)


def digests(paths: Iterable[str | Path], base: Path) -> dict[str, str]:
    """Return the digests of regular files of moderate size, by path; relative to `base` if a file is below
    it."""
    found = {}
    for path in paths:
        resolved = (base / path).resolve()
        content = _read_file(resolved)
        if content is not None:
            name = resolved.relative_to(base) if resolved.is_relative_to(base) else resolved
            found[str(name)] = hashlib.sha256(content).hexdigest()
    return found


def _read_file(path: Path) -> bytes | None:
    """Return the content of a regular file of moderate size, or None."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def read_record(path: Path) -> dict[str, str]:
    """Return the digests that the last attempt has recorded, by path of the file; nothing if it has recorded
    none."""
    content = _read_file(path)
    try:
        recorded = json.loads(content) if content is not None else {}
    except ValueError:
        return {}
    return {str(name): str(digest) for name, digest in recorded.items()} if isinstance(recorded, dict) else {}


def renew_record(path: Path) -> None:
    """Replace a record by the files as they are now: the user has accepted what has changed.

    Raises:
        OSError: the record cannot be written.
    """
    recorded = read_record(path)
    if recorded:
        write_json(path, digests(recorded, Path.cwd()), durable=False)
