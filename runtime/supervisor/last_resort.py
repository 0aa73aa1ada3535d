"""The report of a failure of grpo-run itself: an incident folder with the traceback, and one line.

An exception of the supervisor is an error in grpo-run, or a machine without memory, descriptors or disk.
Called by `outcome.py` and `runtime/launching/launch.py`, whose handlers are the outermost. What follows the
failure is decided there.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.evidence import incident_files
from grpo_run.watchdog.verdict import Location, Verdict

MAX_MESSAGE_CHARACTERS = 300
ADVICE = (
    (
        "This is an error in grpo-run or a shortage of memory, file descriptors or disk space, not in the"
        " script."
    ),
    "Please report it with this file. The same command resumes from the newest checkpoint, if there is one.",
)


def describe(error: BaseException) -> str:
    """Return one line: the type, the message and the line where the exception was raised."""
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARACTERS]
    place = _location(error)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f' ({place.short})' if place else ''}"


def write_report(incidents: Path, error: BaseException, *, step: int, part: str = "the supervisor") -> str:
    """Write the traceback to a new incident folder, and return where it is.

    Args:
        incidents: the folder of all incidents.
        step: the last committed step.
        part: what has failed.

    Returns:
        the path of the report; if it cannot be written, a sentence with the reason and the traceback.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    verdict = Verdict(
        cause=Cause.unknown,
        culprits=(),
        step=step,
        phase=None,
        confidence="proved",
        sentence=f"grpo-run itself failed, in {part}: {describe(error)}",
        signature=f"supervisor:{type(error).__name__}",
        deterministic=False,
        location=_location(error),
        traceback=text,
        advice=ADVICE,
    )
    try:
        folder = incident_files.open_incident(incidents)
        return str(incident_files.close_incident(folder, verdict, []) / "verdict.json")
    except OSError as failure:
        return f"not written ({failure.strerror or failure}):\n{text}"


def _location(error: BaseException) -> Location | None:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    return Location(file=frames[-1].filename, line=frames[-1].lineno or 0, function=frames[-1].name)
