"""A quota on a folder, for processes that start with `environment`: a library in `tests/shims` is
preloaded.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "shims" / "quota.c"
MARKER = ".quota"
"""While this file is in the folder, its quota is used up."""


def environment(library: Path, folder: Path) -> dict[str, str]:
    """Compile the library, and return the variables that processes need.

    Args:
        library: the file that is written.
        folder: all writes to files below it fail while it contains `MARKER`.
    """
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60.0)
    return {"LD_PRELOAD": str(library), "QUOTA_FOLDER": str(folder)}
