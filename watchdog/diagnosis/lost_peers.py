"""Recognize exits and tracebacks of ranks that only lost their connection to another rank.

Used by the diagnosis of exits, by the incident investigation, and by the terminal, which holds such
tracebacks back. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_run.watchdog.memory.error_patterns import recognize
from grpo_run.watchdog.memory.shortage import shortage_of
from grpo_run.watchdog.observation import Exit, RankError

_PEER_ERROR = re.compile(
    r"connection (?:closed|reset) by peer|connectFullMesh failed|remote process has|socket (?:timeout|closed)"
    r"|Broken pipe|DistNetworkError|DistStoreError|NCCL (?:error|communicator was aborted)|ncclRemoteError",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$", re.DOTALL)
"""The line of a traceback that names the exception: it is not indented."""
_TORCH_ERRORS = frozenset(
    {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "TimeoutError"}
)
"""Errors that torch raises from collectives and stores. Python's own connection errors come from the
script."""


def is_victim(exit: Exit) -> bool:
    """Whether the rank's error only reports that a peer exited."""
    return exit.error is not None and is_lost_peer(exit.error)


def is_lost_peer(error: RankError) -> bool:
    """Whether the error only reports that a peer exited."""
    return _reports_lost_peer(error.type, error.message) and shortage_of(error, None) is None


def reports_lost_peer(traceback: Sequence[str]) -> bool:
    """Whether the lines of a printed traceback end in an error that only reports that a peer exited."""
    frames = [number for number, line in enumerate(traceback) if line.startswith('  File "')]
    for number in range(frames[-1] + 1 if frames else 0, len(traceback)):
        found = _ERROR_LINE.match(traceback[number])
        if found is not None:
            message = "\n".join([found[2] or "", *traceback[number + 1 :]])
            lost = _reports_lost_peer(found[1].rpartition(".")[2], message)
            return lost and recognize(("builtins.RuntimeError",), message) is None
    return False


def _reports_lost_peer(error_type: str, message: str) -> bool:
    return error_type in _TORCH_ERRORS and bool(_PEER_ERROR.search(f"{error_type}: {message}"))
