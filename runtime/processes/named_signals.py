"""The signals that `--signals-to-handle` names: which ones they are, and how processes of a run start with them ignored.

A scheduler sends such a signal to every process of a job. The supervisor alone turns it into a stop (`cli.launching`);
ranks and helpers ignore it, and so does what they start, until the script sets a handler. The option reaches every
process in the environment variable that torch elastic uses. Called by what starts processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_run.runtime.errors import UsageError

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
UNNAMED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""torch's default. Ranks keep their dispositions of these: the first ends them, the others come from a terminal."""
REFUSED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})
"""Signals that cannot be handled, or that the supervisor needs itself."""


def parse_signals(names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a comma-separated list of names, as torchrun's option has it.

    Raises:
        UsageError: a name is unknown, or its signal cannot stop a run.
    """
    found = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in REFUSED:
            raise UsageError(
                f"--signals-to-handle {names}: {name} is not a signal that can stop a run; write names such as SIGTERM,SIGUSR1"
            )
        found.append(number)
    return tuple(found)


def ignored_signals() -> tuple[int, ...]:
    """Return the signals that this run's ranks and helpers ignore, by number."""
    return tuple(sorted({int(number) for number in parse_signals(os.environ.get(VARIABLE, ""))} - UNNAMED))


@contextmanager
def inherited_as_ignored() -> Iterator[None]:
    """Within the block, ignore these signals and SIGINT in this process, so that processes started there do too.

    Ctrl-C would end one with a traceback while it starts.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ignored_signals())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
