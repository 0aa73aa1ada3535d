"""`--signals-to-handle` names signals that stop the run; the processes of a run start with them ignored."""

from __future__ import annotations

import signal
import subprocess

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.processes.starting import (
    VARIABLE,
    ignored_signals,
    inherited_as_ignored,
    interpreter_command,
    parse_signals,
)


def test_names_are_those_that_torchrun_takes() -> None:
    """Separated by commas; spaces do not matter."""
    assert parse_signals("SIGTERM, SIGUSR1,") == (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("names", ["USR1", "SIGUSR1,SIGFOO", "SIGKILL", "SIGSTOP", "SIGCHLD", "10"])
def test_a_signal_that_cannot_stop_a_run_is_refused(names: str) -> None:
    """One line names it; otherwise the run would be killed when it comes."""
    with pytest.raises(UsageError, match="--signals-to-handle"):
        parse_signals(names)


def test_ranks_keep_the_dispositions_of_torch_s_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is to find there what it finds under torchrun."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ignored_signals() == ()
    monkeypatch.setenv(VARIABLE, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    assert ignored_signals() == ()
    monkeypatch.setenv(VARIABLE, "SIGTERM,SIGUSR2,SIGUSR1")
    assert ignored_signals() == (signal.SIGUSR1, signal.SIGUSR2)


def test_the_dispositions_of_this_process_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own handler turns the signal into a stop."""
    monkeypatch.setenv(VARIABLE, "SIGUSR1")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    with inherited_as_ignored():
        assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == before


@pytest.mark.parametrize(("names", "ignored"), [("SIGTERM,SIGUSR1", True), ("SIGTERM", False)])
def test_a_fresh_interpreter_ignores_them(monkeypatch: pytest.MonkeyPatch, names: str, ignored: bool) -> None:
    """Also one that is started while a handler is installed here, which exec does not pass on."""
    monkeypatch.setenv(VARIABLE, names)
    command = interpreter_command("os:getpid")
    command[-1] += "\nimport signal; print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)"
    assert subprocess.check_output(command, text=True).strip() == str(ignored)
