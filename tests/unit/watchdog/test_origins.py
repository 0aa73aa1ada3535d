"""Where the exception of a script comes from decides how patiently its start is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_run.runtime.errors import RewardError
from grpo_run.watchdog.causes import Origin, origin_of
from grpo_run.watchdog.observation import Exit, RankError


def failed(error_type: str, *bases: str, code: int = 1) -> Exit:
    """A rank that raised an exception with these base classes."""
    error = RankError(type=error_type, message="m", traceback="t", location=None, wall_time=0.0, bases=bases)
    return Exit(rank=0, pid=1, exit_code=code, signal=None, order=0, error=error)


@pytest.mark.parametrize(
    ("exit", "origin"),
    [
        (failed("KeyError", "builtins.KeyError", "builtins.LookupError"), Origin.code),
        (failed("FileNotFoundError", "builtins.FileNotFoundError", "builtins.OSError"), Origin.files),
        (failed("ConnectTimeout", "httpx.ConnectTimeout", "httpx.HTTPError"), Origin.network),
        (
            failed("HfHubHTTPError", "huggingface_hub.errors.HfHubHTTPError", "builtins.OSError"),
            Origin.network,
        ),
        (failed("ConnectionRefusedError", "builtins.ConnectionError", "builtins.OSError"), Origin.network),
        (
            failed("RuntimeError", "builtins.RuntimeError", "requests.exceptions.ConnectionError"),
            Origin.network,
        ),
        (failed("DistNetworkError", "torch.distributed.DistNetworkError"), Origin.network),
        (failed("IndentationError", "builtins.IndentationError", "builtins.SyntaxError"), Origin.usage),
        (failed("SystemExit", "builtins.SystemExit", code=2), Origin.usage),
        (failed("SystemExit", "builtins.SystemExit", code=1), Origin.code),
        (failed("Wandbug", "wandbug.Error"), Origin.code),
        (
            failed("DistBackendError", "torch.distributed.DistBackendError", "torch.distributed.DistError"),
            Origin.device,
        ),
        (failed("AcceleratorError", "torch.AcceleratorError", "builtins.RuntimeError"), Origin.device),
    ],
)
def test_origins(exit: Exit, origin: Origin) -> None:
    """By the names of the classes, because the libraries are not imported here."""
    found, final = origin_of(exit, starting=True)
    assert found is origin
    assert bool(final) is (origin is Origin.usage)


@pytest.mark.parametrize(
    ("message", "origin"),
    [
        ("CUDA error: an illegal memory access was encountered", Origin.device),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Origin.device),
        ("NCCL error in: ProcessGroupNCCL.cpp:1", Origin.device),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Timed out", Origin.device),
        ("custom error: no reward", Origin.code),
        ("the judge reports a CUDA error", Origin.code),
        ("mat1 and mat2 shapes cannot be multiplied", Origin.code),
    ],
)
def test_torch_reports_devices_by_the_beginning_of_the_message(message: str, origin: Origin) -> None:
    """Its class says nothing then. A text that quotes such an error is the script's."""
    exit = failed("RuntimeError", "builtins.RuntimeError")
    assert exit.error is not None
    exit = replace(exit, error=replace(exit.error, message=message))
    assert origin_of(exit, starting=False) == (origin, "")


def test_exit_code_2_inside_training_is_no_usage_error() -> None:
    """argparse runs at the start."""
    assert origin_of(failed("SystemExit", code=2), starting=False) == (Origin.code, "")


def test_a_rank_without_an_error_file_says_nothing() -> None:
    """It was ended by `os._exit`."""
    silent = Exit(rank=0, pid=1, exit_code=7, signal=None, order=0)
    assert origin_of(silent, starting=True) == (Origin.code, "")


def test_functions_that_never_gave_a_reward_are_not_tried_again() -> None:
    """Each attempt would take some steps first, and so count as progress. The name is that of the class."""
    name = f"{RewardError.__module__}.{RewardError.__qualname__}"
    origin, final = origin_of(failed("RewardError", name), starting=False)
    assert (origin, final) == (Origin.usage, "the reward functions return no valid reward")
