"""Exhausted memory that only the output of a rank shows: an aborted process, and an engine in a process of
its own.
"""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import make_error, make_exit

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource, needs_output, reported_in
from grpo_run.watchdog.memory.shortage import shortage_of

ABORTED = {"signal": signal.SIGABRT}
PRINTED = "step 3\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
ENGINE = (
    "(EngineCore_DP0 pid=912) ERROR 08-22 10:00:00 [core.py:700] EngineCore failed to start.\n"
    "(EngineCore_DP0 pid=912) ERROR 08-22 10:00:00 [core.py:700]     self.model = self.model.to(device)\n"
)
CUDA_LINE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of"
    " 24.00 GiB"
)
DEAD = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"


@pytest.mark.parametrize(
    ("output", "cause", "source"),
    [
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            Cause.host_oom,
            ErrorSource.host,
        ),
        (
            (
                "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n"
                "  what():  CUDA out of memory. Tried to allocate 2.00 GiB.\nException raised from malloc\n"
            ),
            Cause.gpu_oom,
            ErrorSource.allocator,
        ),
        (
            (
                "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0"
                " PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: out"
                " of memory\n"
            ),
            Cause.gpu_oom,
            ErrorSource.driver,
        ),
    ],
)
def test_an_aborted_rank_is_explained_by_what_the_runtime_prints(
    output: str, cause: Cause, source: ErrorSource
) -> None:
    """It leaves no exception."""
    exit = make_exit(0, **ABORTED)
    assert needs_output(exit)
    error = reported_in(PRINTED + output, exit, 12.0)
    shortage = shortage_of(error, None)
    assert error is not None
    assert shortage is not None
    assert (shortage.cause, shortage.source, error.wall_time) == (cause, source, 12.0)


@pytest.mark.parametrize(
    "output",
    [
        "",
        PRINTED,
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  bad index: CUDA out of"
            " memory\n"
        ),
        "terminate called without an active exception\n",
    ],
)
def test_an_aborted_rank_without_such_a_report_stays_a_signal(output: str) -> None:
    """What it has printed before does not count."""
    assert reported_in(output, make_exit(0, **ABORTED), 12.0) is None


@pytest.mark.parametrize("line", [f"(EngineCore_DP0 pid=912) ERROR 08-22 10:00:00 [core.py:700] {CUDA_LINE}\n",  # noqa: E501
                                  f"ERROR 05-14 12:00:00 [core.py:396] {CUDA_LINE}\n"])  # fmt: skip
def test_an_engine_that_has_ended_is_explained_by_its_log(line: str) -> None:
    """The rank's own exception names no reason; its phase and traceback are kept."""
    dead = make_error(type="RuntimeError", message=DEAD)
    exit = make_exit(0, error=dead)
    assert needs_output(exit)
    error = reported_in(PRINTED + ENGINE + line + "more\n", exit, 12.0)
    assert error is not None
    assert (error.type, error.traceback, error.wall_time) == ("RuntimeError", dead.traceback, dead.wall_time)
    shortage = shortage_of(error, None)
    assert shortage is not None
    assert shortage.figures.tried_bytes == round(1.5 * 1024**3)


def test_a_log_of_an_engine_without_such_an_error_adds_nothing() -> None:
    """Neither does a line that the script has printed."""
    exit = make_exit(0, error=make_error(type="RuntimeError", message=DEAD))
    other = "ERROR 05-14 12:00:00 [core.py:396] ValueError: CUDA out of memory is no number\n"
    assert reported_in(PRINTED + ENGINE + other, exit, 12.0) is None


def test_the_output_of_other_failures_is_not_read() -> None:
    """A script may print anything."""
    assert not needs_output(make_exit(0, error=make_error()))
    assert not needs_output(make_exit(0, signal=signal.SIGKILL))
    assert not needs_output(make_exit(0, exit_code=3))
