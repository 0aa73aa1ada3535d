"""The driver of the GPUs (NVML), opened. Any call may hang for as long as the driver does.

Used where processes of GPUs are evidence (`evidence/_node_memory.py`), where GPUs are watched
(`runtime/memory/gpus.py`), and where a rollout server gets those that are left. Allocates nothing on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class GpuDriverError(Exception):
    """The driver has refused a call."""


class NoGpuDriver(GpuDriverError):
    """This machine has no driver, or it is not loaded."""


@contextmanager
def gpu_driver() -> Iterator[Any]:
    """Yield `pynvml`, with the driver open.

    Raises:
        GpuDriverError: it cannot be opened, or a call within has failed.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        yield pynvml
        pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        raise NoGpuDriver(str(error)) from error
    except pynvml.NVMLError as error:
        raise GpuDriverError(str(error)) from error
