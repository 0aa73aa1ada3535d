"""Log files of a run, as JSON lines of bounded size: one for each rank and attempt, one for the supervisor.

Written by the supervisor with structlog: what is journaled, sorted by rank, and what code beside the run
reports (the metrics server). A log line costs the ranks nothing. What a rank journals while there is no
supervisor is in the journal only. Never holds prompts or completions, nor what the script prints, and leaves
the logging of the script alone. Called by `_supervise.py`. Nothing of grpo-run reads these files.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import structlog

from grpo_run.runtime.event import Event, as_record, event_name
from grpo_run.runtime.history.events import IncidentConfirmed, WarningGiven
from grpo_run.runtime.history.run_directory import RunDirectory

MAX_BYTES = 16 * 1024 * 1024
"""Size at which a file is renamed and begun anew; the one that was renamed before is replaced."""
PROCESSORS: list[Any] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
    structlog.processors.JSONRenderer(),
]
LEVELS = structlog.make_filtering_bound_logger(logging.INFO)


class BoundedFile:
    """Appends lines to a file, which with the one before it takes at most 2 * `MAX_BYTES` and a line.

    Opened for each line like the journal. Takes no lock: a line is one `write`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, line: str) -> None:
        """Append a line. One that the disk does not accept is lost: the journal reports such a disk."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with contextlib.suppress(OSError):  # `Reporter.write` tells the user of a disk that accepts nothing
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, data)
                full = os.fstat(descriptor).st_size >= MAX_BYTES
            finally:
                os.close(descriptor)
            if full:
                os.replace(self._path, self._path.with_suffix(".1.jsonl"))

    info = warning = error = critical = write


def log_to_file(run: RunDirectory) -> None:
    """Send what this process logs with structlog to the supervisor's file, instead of to the terminal."""
    file = BoundedFile(run.log)
    structlog.configure(list(PROCESSORS), wrapper_class=LEVELS, logger_factory=lambda *_: file)


def log_event(run: RunDirectory, event: Event) -> None:
    """Log an event of the journal: to the file of the rank that it is of, or to the supervisor's."""
    path = run.log
    if event.rank is not None and event.attempt is not None:
        path = run.attempt(event.attempt) / f"rank{event.rank}.jsonl"
    hidden = {"event", *event.private_fields}
    fields = {name: value for name, value in as_record(event).items() if name not in hidden}
    logger = structlog.wrap_logger(BoundedFile(path), PROCESSORS, LEVELS, dict)
    is_warning = isinstance(event, (WarningGiven, IncidentConfirmed))
    logger.bind(**fields).log(logging.WARNING if is_warning else logging.INFO, event_name(event))
