"""The last sample of host memory, in a small file of the run directory that outlives every process.

The supervisor writes it about once a second. It is not mapped: a mapped file that is truncated would end the
supervisor. `grpo-run status` reads it. The record is a line of JSON at its beginning, written by one system
call; what follows is older.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_run.runtime.files import close_with
from grpo_run.watchdog.json_values import from_json, to_json
from grpo_run.watchdog.memory.host_sample import HostSample

FILE_BYTES = 64 * 1024
"""Enough for some 300 ranks of a node; a longer record is written without ranks."""
READ_ATTEMPTS = 3
"""A reader may see a record that is written at this moment."""


class LastSample:
    """The writing side.

    Args:
        path: of the file, created anew with mode 0600.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        temporary = path.with_name(path.name + ".new")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            return  # the disk is full: samples are known to this process only
        close_with(self, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            os.replace(temporary, path)
        except OSError:
            return
        self._descriptor = descriptor

    def write(self, sample: HostSample) -> None:
        """Replace the record."""
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, _encode(sample), 0)
        except OSError:
            self._descriptor = None  # truncated on a disk that is full now


def read_last_sample(path: Path) -> HostSample | None:
    """Return the sample in a file; None if there is none, or if it is damaged or of another version."""
    for _ in range(READ_ATTEMPTS):
        try:
            line, _, _ = path.read_bytes().partition(b"\n")
            return from_json(HostSample, json.loads(line))
        except OSError:
            return None
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return None


def _encode(sample: HostSample) -> bytes:
    value = to_json(sample)
    text = json.dumps(value, separators=(",", ":")) + "\n"
    if len(text) > FILE_BYTES:
        text = json.dumps({**value, "ranks": {}}, separators=(",", ":")) + "\n"
    return text.encode()
