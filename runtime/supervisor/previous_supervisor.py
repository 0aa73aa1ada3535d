"""Terminate what the previous supervisor of a run has left behind, before new ranks start.

Usually nothing: a supervisor ends its helpers, and after its SIGKILL its guardian does. Both may be killed
together, as by the kernel when memory is short. The file `processes.json` names the last supervisor and the
token of its ranks. Whoever holds the run's lock reads it; a copy of a run directory names a supervisor that
may be alive, whose processes are left alone. Called by `runtime/launching/`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from grpo_run.runtime.files import write_json
from grpo_run.runtime.processes import identity
from grpo_run.runtime.processes.companion import companion_token
from grpo_run.runtime.processes.identity import ProcessIdentity
from grpo_run.runtime.processes.termination import TerminatedProcess, terminate
from grpo_run.watchdog.processes import read_processes
from grpo_run.watchdog.run_processes.keeping import without_kept
from grpo_run.watchdog.run_processes.ownership import RunProcesses

MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class SupervisorIdentity(ProcessIdentity):
    """One supervisor, and the token in the environments of its ranks."""

    token: str


_ADAPTER = pydantic.TypeAdapter(SupervisorIdentity)


def own_identity(token: str) -> SupervisorIdentity:
    """Return the identity of this process."""
    return SupervisorIdentity(**vars(identity.own_identity()), token=token)


def end_previous(file: Path, own: SupervisorIdentity, keep: Sequence[str]) -> list[TerminatedProcess]:
    """End what the supervisor named in the file has left behind, and name this one instead.

    Args:
        file: `processes.json` of the run, whose lock this process holds.
        own: this supervisor.
        keep: patterns of `--keep`.

    Returns:
        what was signaled.
    """
    ended: list[TerminatedProcess] = []
    with contextlib.suppress(OSError):  # no descriptor, or a full disk: the run does not depend on it
        last = _read(file)
        if last is not None and last.is_visible and not last.is_alive:
            left = RunProcesses(
                os.getpid(), os.getsid(0), tokens=(last.token, companion_token(last)), any_age=True
            )
            ended = terminate(lambda: without_kept(left.find(read_processes()), keep), sessions=())
        write_json(file, _ADAPTER.dump_python(own))
    return ended


def _read(file: Path) -> SupervisorIdentity | None:
    """Return what the file says; None if there is none, or it was damaged."""
    try:
        with open(file, "rb") as opened:
            return _ADAPTER.validate_json(opened.read(MAX_FILE_BYTES))
    except (FileNotFoundError, pydantic.ValidationError):
        return None
