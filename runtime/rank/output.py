"""Standard output and standard error of a rank: unbuffered, and tolerant of a full disk.

Called by the bootstrap before the script runs. Gives the script the streams that `python -u` would give it.
Does not read or forward output; `runtime/processes/output.py` does that in the supervisor.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from grpo_run.runtime.files import NO_SPACE_ERRNOS


class RankOutput(io.FileIO):
    """A raw output stream that discards what a full disk does not accept, so that `print` does not raise."""

    def write(self, data: Any) -> int:
        """Write `data`; on a full disk, discard it and report it as written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            return memoryview(data).nbytes


def redirect_output(log: str, errors: str) -> None:
    """Redirect the descriptors of standard output and standard error to the rank's files, which may be the
    same.
    """
    for path, stream in ((log, 1), (errors, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)


def wrap_output(*, forked: bool) -> None:
    """Replace `sys.stdout` and `sys.stderr` by unbuffered streams, as `python -u` does.

    A killed process then loses no output.

    Args:
        forked: this process was forked from the warm interpreter, whose own encoding does not apply.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = RankOutput(descriptor, "w", closefd=False)
        encoding, errors = "utf-8", "backslashreplace"
        if not forked:
            encoding, errors = getattr(sys, name).encoding, getattr(sys, name).errors
        setattr(sys, name, io.TextIOWrapper(raw, encoding, errors, write_through=True))


def flush_output() -> None:
    """Flush both streams, unless the script has closed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
