"""py-spy: the Python stacks of another process, read from its memory.

Called by `stack_capture.py`. Requires the right to trace: the same user, and under Yama's `ptrace_scope` 1
the traced process must have named this process (or its parent) with PR_SET_PTRACER. Does not parse
(`stacks.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MAX_DUMP_BYTES = 1024 * 1024


def dump(pid: int, file: Path, native: bool, timeout_seconds: float) -> str | None:
    """Run `py-spy dump` on one process and write its output to a file. Return what went wrong, or None.

    With `native`, py-spy pauses the process while it reads; without, it does not.
    """
    program = find_py_spy()
    if program is None:
        return "py-spy is not installed"
    command = [program, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as output:
            ran = subprocess.run(
                [*command, "--native" if native else "--nonblocking"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=timeout_seconds,
                check=False,
            )
        if file.stat().st_size > MAX_DUMP_BYTES:
            os.truncate(file, MAX_DUMP_BYTES)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_seconds:.1f} s"
    except OSError as error:
        return str(error)
    if ran.returncode:
        message = ran.stderr.decode(errors="replace").strip() or file.read_text(errors="replace")
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        return (lines[0] if lines else f"exit code {ran.returncode}")[:200]
    return None


def find_py_spy() -> str | None:
    """Return the program beside this interpreter or on PATH, or None."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
