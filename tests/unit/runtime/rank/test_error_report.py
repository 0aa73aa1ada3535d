"""What the error file of a rank says of the exception that ended it, written by a rank and read by the
supervisor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.error_report import MAX_CAUSES, write_error
from grpo_run.runtime.rank.session import Session
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.shortage import shortage_of
from grpo_run.watchdog.observation import Phase, RankError

Report = Callable[[Callable[[Session], object]], RankError]


@pytest.fixture
def report(
    board: Board, make_settings: Callable[..., RankSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Report:
    """Let a script fail in a session, and read what the supervisor reads."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    files = AttemptFiles(RunDirectory(path=tmp_path / "run"), 0)
    files.make()
    session = Session(make_settings(error=str(files.error(0))))

    def fail(script: Callable[[Session], object]) -> RankError:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - any exception of a script
            script(session)
        write_error(session, raised.value)
        error = files.read_error(0)
        assert error is not None
        return error

    return fail


def exhaust(session: Session) -> None:
    """Run out of memory in generation."""
    session.slot.enter(Phase.score)
    session.slot.enter(Phase.score)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    finally:
        session.slot.leave(Phase.score)


def translate(session: Session) -> None:
    """Raise another exception from it."""
    try:
        exhaust(session)
    except torch.OutOfMemoryError as error:
        raise ValueError("the step has failed") from error


def fail_on_the_way(session: Session) -> None:
    """A cleanup fails because of it."""
    try:
        exhaust(session)
    finally:
        raise KeyError("state")


def group(session: Session) -> None:
    """Several tasks fail; one of them has run out of memory."""

    class TasksFailed(Exception):
        exceptions: tuple[Exception, ...]

    try:
        exhaust(session)
    except torch.OutOfMemoryError as error:
        failed = TasksFailed("2 tasks have failed")
        failed.exceptions = (ValueError("another"), error)
    raise failed


def test_the_last_cause_is_recorded_in_one_line(report: Report) -> None:
    """The end of the chain of `raise ... from ...`; not what was handled on the way."""

    def wrap(session: Session) -> None:
        try:
            translate(session)
        except ValueError as error:
            raise RuntimeError("the run has failed") from error

    assert report(wrap).root == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    for script in (exhaust, handle, fail_on_the_way, translate_implicitly):
        assert report(script).root == ""


def handle(session: Session) -> None:
    """Say that the first exception does not matter."""
    try:
        exhaust(session)
    except torch.OutOfMemoryError:
        raise ValueError("the step has failed") from None


def exhaust_in_a_block(session: Session) -> None:
    """A context manager fails on the way out, in a `finally` and in an `except` that would have passed it
    on.
    """

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            {}["state"]
            raise error  # noqa: TRY201 - as scripts do

    with block():
        exhaust(session)


def translate_implicitly(session: Session) -> None:
    """`raise` in an `except` clause, without `from`."""
    try:
        exhaust(session)
    except torch.OutOfMemoryError:
        print("out of memory")
        raise ValueError("the step has failed")  # noqa: B904


def fail_after_a_retry(session: Session) -> None:
    """The handler goes on with smaller batches; that this fails for a reason of its own cannot be told."""
    try:
        exhaust(session)
    except torch.OutOfMemoryError:
        for size in (4, 2):
            if size == 2:
                int("two")


@pytest.mark.parametrize(
    "script",
    [
        exhaust,
        translate,
        fail_on_the_way,
        group,
        exhaust_in_a_block,
        translate_implicitly,
        fail_after_a_retry,
    ],
)
def test_exhausted_memory_is_found_however_the_script_passes_it_on(
    report: Report, script: Callable[[Session], object]
) -> None:
    """With the phase in which it was raised."""
    shortage = shortage_of(report(script), None)
    assert shortage is not None
    assert (shortage.cause, str(shortage.phase)) == (Cause.gpu_oom, "score")
    assert shortage.figures.tried_bytes == 2 * 1024**3


def test_an_exception_that_hides_its_context_is_one_of_its_own(report: Report) -> None:
    """`raise ... from None`."""
    error = report(handle)
    assert shortage_of(error, None) is None
    assert [one.types[0] for one in error.chain] == ["builtins.ValueError"]


def test_a_long_or_circular_chain_is_bounded(report: Report) -> None:
    """A file of a few kilobytes, whatever the script does."""

    def script(session: Session) -> None:
        first = error = ValueError("0")
        for number in range(20):
            error.__cause__ = following = ValueError(str(number))
            error = following
        error.__cause__ = first
        raise first

    assert len(report(script).chain) == MAX_CAUSES


@pytest.mark.parametrize(
    ("phase", "counts"), [(Phase.reward, False), (Phase.callback, False), (Phase.forward_backward, True)]
)
def test_a_reward_that_raises_what_a_server_has_answered_has_memory(
    report: Report, phase: Phase, counts: bool
) -> None:
    """In the words of torch, but in a frame of the script; elsewhere such an exception passes on what a
    library said.
    """

    def script(session: Session) -> None:
        if phase is Phase.callback:
            session.slot.enter_callback("Mine.on_log")
        else:
            session.slot.enter(phase)
        try:
            raise RuntimeError("CUDA error: out of memory")
        finally:
            session.slot.leave(phase)

    error = report(script)
    assert error.chain[0].by_script
    assert (shortage_of(error, None) is not None) is counts


def test_a_reward_that_runs_out_of_memory_in_a_library_is_named(report: Report) -> None:
    """torch raises it in a call of the script."""

    def script(session: Session) -> None:
        session.slot.enter(Phase.reward)
        try:
            torch.empty(1 << 50)
        finally:
            session.slot.leave(Phase.reward)

    error = report(script)
    shortage = shortage_of(error, None)
    assert shortage is not None
    assert shortage.cause is Cause.host_oom
    assert shortage.figures.tried_bytes == 4 << 50
