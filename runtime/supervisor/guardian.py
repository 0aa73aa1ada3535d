"""The guardian: a small process that terminates what a supervisor killed by SIGKILL leaves behind.

Forkserver, ranks and drain worker die with the supervisor (`runtime/processes/starting.py`). What the
ranks have started does not, and would keep ports, memory and devices. The guardian waits for the
supervisor's exit on a pidfd, notes whether the kernel has killed it, terminates the processes that belong
to the ranks, removes the supervisor's folder of temporary files, and writes one event to the journal. Until
then it looks at the processes now and then, to remember those that have left both their parents and their
environment. It stays in the supervisor's session, which is how it is told from a helper. When a run ends in
order, the supervisor ends it.

`Guardian` is the supervisor's side, `main` the process. `report` and `event_fields` also serve the
supervisor when it terminates helper processes itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.processes.starting import inherited_as_ignored, interpreter_command
from grpo_run.runtime.processes.termination import TerminatedProcess, describe, terminate
from grpo_run.watchdog.processes import read_processes
from grpo_run.watchdog.run_processes.keeping import without_kept
from grpo_run.watchdog.run_processes.ownership import RunProcesses

MAX_LISTED = 100
"""Processes in one event."""


class ProcessesEnded(Event, kw_only=True):
    """Processes that the ranks had left were terminated.

    Attributes:
        by: who did it: `supervisor`, or `guardian` after the supervisor's death.
        processes: the first `MAX_LISTED` of them.
    """

    by: str
    count: int
    sentence: str
    processes: list[dict[str, Any]]


def report(reporter: Reporter, terminated: list[TerminatedProcess]) -> None:
    """Write the event and tell the user, if anything was terminated."""
    if not terminated:
        return
    event = event_of(terminated, by="supervisor")
    reporter.write(event)
    if event.sentence:
        reporter.notify(event.sentence)


def event_of(terminated: list[TerminatedProcess], *, by: str) -> ProcessesEnded:
    """Return the event for what was signaled."""
    return ProcessesEnded(
        by=by,
        count=len(terminated),
        sentence=describe(terminated),
        processes=[
            {
                "pid": one.pid,
                "name": one.name,
                "command": one.command,
                "killed": one.killed,
                "remains": one.remains,
            }
            for one in terminated[:MAX_LISTED]
        ],
    )


LOOK_SECONDS = 0.5
"""Least time between two looks at the processes of the run."""
COST_FRACTION = 0.005
"""Share of one core that the looks may take; on a machine with many processes they are made less often."""
EXIT_SECONDS = 5.0
"""How long the guardian may take to exit after it was killed."""
MAX_MESSAGE_BYTES = 64 * 1024
SETTINGS = "GRPO_RUN_GUARDIAN"
"""Environment variable with the settings of the process, as JSON."""


class Guardian:
    """The supervisor's side of its guardian.

    Args:
        tokens: values of the token variable in the environments of this supervisor's ranks.
        keep: patterns of `--keep`.
        temporary: a folder that the supervisor would have removed at its exit.
    """

    def __init__(
        self, journal: Path, run_id: str, *, tokens: Sequence[str], keep: Sequence[str], temporary: str | None
    ) -> None:
        settings = {
            "supervisor": os.getpid(),
            "session": os.getsid(0),
            "journal": str(journal),
            "run_id": run_id,
            "tokens": list(tokens),
            "keep": list(keep),
            "temporary": temporary,
        }
        with inherited_as_ignored():  # it leaves the process group afterwards
            self._process = subprocess.Popen(
                interpreter_command(f"{__name__}:main"),
                env={**os.environ, SETTINGS: json.dumps(settings)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )

    def begin_attempt(self, ranks: Collection[int]) -> None:
        """Tell it the ranks of a new attempt, by pid."""
        assert self._process.stdin is not None
        # it may have been killed; the run goes on without it
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(list(ranks)).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """End it: the run has ended in order."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)


def main() -> None:
    """Wait for the end of the supervisor, then end what its ranks have started. Entry point of the
    process.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # as sent to every process of a job that is to stop
    os.setpgrp()
    os.chdir("/")
    settings = json.loads(os.environ[SETTINGS])
    owned = RunProcesses(settings["supervisor"], settings["session"], tokens=settings["tokens"])
    ranks = _wait_for_exit(settings["supervisor"], owned)
    terminated = terminate(
        lambda: without_kept(owned.find(read_processes()), settings["keep"]), sessions=ranks
    )
    if settings["temporary"] is not None:
        shutil.rmtree(settings["temporary"], ignore_errors=True)
    _report(terminated, settings)


def _wait_for_exit(supervisor: int, owned: RunProcesses) -> list[int]:
    """Return the last attempt's ranks when the supervisor has exited; look at its processes until then."""
    ranks: list[int] = []
    received = b""
    try:
        pidfd = os.pidfd_open(supervisor)
    except ProcessLookupError:
        return ranks
    if os.getppid() != supervisor:
        return ranks  # it has exited before, and its pid is in use again
    waiting, pause_seconds = select.poll(), 0.0
    waiting.register(pidfd, select.POLLIN)
    waiting.register(0, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll(pause_seconds * 1000)}
        if pidfd in ready:
            return ranks
        if 0 in ready:
            data = os.read(0, MAX_MESSAGE_BYTES)
            if not data:
                waiting.unregister(0)  # the supervisor's death closes its end a moment before
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                ranks = json.loads(line)
                owned.begin_attempt(ranks)
        began = time.process_time()  # CPU time: on a loaded machine a look may take long, and cost little
        with contextlib.suppress(OSError):
            owned.find(read_processes())
        pause_seconds = max(LOOK_SECONDS, (time.process_time() - began) / COST_FRACTION)


def _report(terminated: list[TerminatedProcess], settings: dict[str, Any]) -> None:
    if not terminated:
        return
    sentence = describe(terminated)
    # nobody may be left to read it
    with contextlib.suppress(OSError):
        if sentence:
            print(f"grpo-run: the supervisor was killed; {sentence}", file=sys.stderr, flush=True)
        Journal(Path(settings["journal"]), settings["run_id"]).write(event_of(terminated, by="guardian"))
