"""A process that lives beside the ranks, across attempts, such as a server that they use.

It leads a session and carries a token of its own in its environment, so that it is told from what the ranks
have started: it outlives them at the end of an attempt, and ends with the run. If the supervisor is killed,
its guardian or the next supervisor ends it by that token. Started and ended by a feature. Does not watch it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_run.runtime.processes.adoption import note_companion
from grpo_run.runtime.processes.identity import ProcessIdentity, own_identity
from grpo_run.runtime.processes.termination import TerminatedProcess, terminate
from grpo_run.watchdog.processes import ProcessStat, read_processes
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses

EXIT_SECONDS = 5.0
"""How long its exit code is waited for after everything has been ended."""


def companion_token(supervisor: ProcessIdentity) -> str:
    """Return the token of a supervisor's companions."""
    return f"companion-{supervisor.namespace}-{supervisor.pid}-{supervisor.started_ticks}"


class Companion:
    """One process and what it starts.

    Args:
        words: of its command.
        environment: complete; the token is added.
        log: gets its output, appended; created with mode 0600.

    Raises:
        OSError: it cannot be started, or the log cannot be opened.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        token = companion_token(own_identity())
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                words,
                # setproctitle would overwrite the environment that /proc shows, and the token with it
                env={**environment, TOKEN_VARIABLE: token, "SPT_NOENV": "1"},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        note_companion(self._process.pid)
        self._owned = RunProcesses(os.getpid(), os.getsid(0), tokens=(token,))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it has ended, negative for a signal; None while it lives."""
        return self._process.poll()

    def processes(self) -> dict[int, ProcessStat]:
        """Return it and what it has started, as far as they are alive, by pid."""
        return self._owned.find(read_processes())

    def end(self) -> list[TerminatedProcess]:
        """End it and what it has started, and wait until all have exited: their memory is free then.

        Returns:
            what was signaled; what has survived SIGKILL is marked.
        """
        ended = terminate(self.processes, sessions=())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        return ended
