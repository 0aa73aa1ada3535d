"""Torch's worker server, which serves the Flight Recorder from C++ threads even while Python is stuck.

Started by the session when `torch.distributed` is imported; `runtime/detection/flight_recorder.py` is its
client.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from grpo_run.trainers import upstream


def start_worker_server(path: str) -> Any:
    """Start the worker server on a unix socket and return it. The caller must keep the returned object.

    The server prints a warning when it starts, which is suppressed because it does not concern the user.

    Raises:
        RuntimeError: the server cannot listen on `path`.
    """
    from torch._C import _distributed_c10d

    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        return getattr(_distributed_c10d, upstream.WORKER_SERVER)(path)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
