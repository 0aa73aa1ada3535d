"""Move the wall clock of a run's processes, without setting the machine's: a library in `tests/shims` is
preloaded.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "shims" / "moved_clock.c"
COMPILE_SECONDS = 60.0


def unsupported() -> str | None:
    """Return why the clock of a process cannot be moved here, or None."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return "the preloaded clock is made for glibc on x86-64"
    return None if shutil.which("cc") else "no C compiler"


class MovedClock:
    """The wall clock of processes started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        library = folder / "moved_clock.so"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=COMPILE_SECONDS)
        self.move(0)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, seconds: int) -> None:
        """Move the clock by so many seconds from the machine's, at once for all processes."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(f"{seconds:+07d}\n".encode())
