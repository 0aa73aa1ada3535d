"""The error file of a rank: the exception that ended its script, for the supervisor.

Written by `bootstrap.py`, once per rank and attempt; read by `runtime/supervisor/attempt.py`. The file has
the chain of exceptions: those that the last one was raised from, and those that were being handled when it
was raised. An exhausted GPU on which a cleanup fails is thus found; `raise ... from None` hides it. Whether
the script had recovered from the earlier exception cannot be told, so it counts as the cause. Prints
nothing.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_run.runtime.board.slot_writer import phases_of
from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.files import write_json
from grpo_run.runtime.rank.session import Session
from grpo_run.watchdog.evidence.source import is_user_file
from grpo_run.watchdog.json_values import to_json

MAX_TRACEBACK_CHARACTERS = 32_000
MAX_MESSAGE_CHARACTERS = 4000
MAX_ROOT_CHARACTERS = 200
MAX_CAUSES = 8
"""Exceptions of a chain (`raise ... from ...`) whose classes are recorded."""


def user_traceback(error: BaseException, launcher: str) -> TracebackType | None:
    """Return the error's traceback from the first frame of the script on.

    Args:
        launcher: source file whose frames, and those of runpy, are omitted.
    """
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != launcher and "runpy" not in name:
            return frame
        frame = frame.tb_next
    return error.__traceback__


def write_error(session: Session, error: BaseException) -> None:
    """Write the exception and its location to the rank's error file; nothing in a process forked from it.

    If the disk is full, a warning is journaled instead; the supervisor then knows the exit code only.
    """
    if not session.is_rank:
        return
    try:
        write_json(
            Path(session.settings.error), _describe(error, session.own_steps), indent=None, durable=False
        )
    except OSError as failure:
        session.warn_in_journal(f"the error file could not be written: {failure}")


def _describe(error: BaseException, own_steps: int) -> dict[str, Any]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_file(frame.filename)]
    last = next(reversed(own or list(frames)), None)
    raised, causes = phases_of(error), _causes(error)
    return {
        "type": type(error).__name__,
        "message": _message(error)[:MAX_MESSAGE_CHARACTERS],
        "traceback": text
        if len(text) <= MAX_TRACEBACK_CHARACTERS
        else "…" + text[-MAX_TRACEBACK_CHARACTERS:],
        "location": [last.filename, last.lineno or 0, last.name] if last is not None else None,
        "wall_time": time.time(),
        "phases": list(raised.phases) if raised is not None else None,
        "callback": raised.callback if raised is not None else "",
        "bases": list(dict.fromkeys(name for cause in causes for name in _types(cause))),
        "chain": [_raised(one) for one in _chain(error)],
        "root": _first_line(causes[-1]) if len(causes) > 1 else "",
        "own_steps": own_steps,
        "alarm": to_json(error.alarm) if isinstance(error, AlarmRaised) and error.alarm is not None else None,
    }


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and those that it was raised from (`raise ... from ...`)."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and len(found) <= MAX_CAUSES:
        found.append(cause)
    return found


def _types(error: BaseException) -> list[str]:
    """The full names of the classes of an exception."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__[:-1]]


def _first_line(error: BaseException) -> str:
    """An exception as Python prints it, in one line."""
    text = _message(error).strip().partition("\n")[0][:MAX_ROOT_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, those that it was raised from, and those that were being handled when it was raised."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(found) < MAX_CAUSES:
        one = waiting.pop(0)
        if one is None or any(one is known for known in found):
            continue
        found.append(one)
        waiting += [*_grouped(one), one.__cause__, None if one.__suppress_context__ else one.__context__]
    return found


def _grouped(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, such as a task group of asyncio raises; Python 3.10 has no class of its own
    for them.
    """
    grouped = getattr(error, "exceptions", ())
    return [one for one in grouped if isinstance(one, BaseException)] if isinstance(grouped, tuple) else []


def _raised(error: BaseException) -> dict[str, Any]:
    phases = phases_of(error)
    return {
        "types": _types(error),
        "message": _message(error)[:MAX_MESSAGE_CHARACTERS],
        "phases": list(phases.phases) if phases is not None else None,
        "by_script": _is_raised_by_script(error),
    }


def _is_raised_by_script(error: BaseException) -> bool:
    """Whether the innermost frame is the script's: no Python code of a library has raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_user_file(trace.tb_frame.f_code.co_filename)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the script's own __str__ may raise anything
        return "no message: str() of the exception failed"
