"""Exhausted memory that no exception of the rank reports, from the last lines of its output. Pure; called by
`runtime.supervision.attempts.exits` for two kinds of failure only, so that nothing that a healthy rank prints counts.

- The C++ runtime aborts a process that has thrown an exception in a thread without Python, and prints it.
- An engine of vLLM in a process of its own prints its exception; the rank's says only that the engine has ended.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from grpo_run.watchdog.observation import Exit, RaisedError, RankError
from grpo_run.watchdog.out_of_memory.error_patterns import recognize

OUTPUT_BYTES = 256 * 1024
"""How much of the end of the output is needed: an engine's traceback is repeated by each process that it has."""
_THROWN = re.compile(
    r"^terminate called after throwing an instance of '(?P<type>[^'\n]+)'\n(?:  what\(\):  (?P<what>[^\n]*))?",
    re.MULTILINE,
)
"""libstdc++'s report (`__verbose_terminate_handler`)."""
_WATCHDOG_PREFIX = re.compile(r"\[[^\]\n]*\][^\n]*?terminated with exception: ")
"""Before the message of an exception that has ended NCCL's watchdog (ProcessGroupNCCL.cpp)."""
_ENGINE_DEAD = re.compile(r"Engine core initialization failed|EngineCore encountered an issue", re.IGNORECASE)
_ENGINE_ERROR = re.compile(
    r"^(?:\((?:EngineCore|Worker|VllmWorker)[^)\n]*\) )?ERROR [^\n]*?\[[\w.]+\.py:\d+\] "
    r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)): (?P<message>[^\n]*)$",
    re.MULTILINE,
)
"""A line of vLLM's log that ends a traceback."""
_BAD_ALLOCATION = "std::bad_alloc"


def needs_output(exit: Exit) -> bool:
    """Whether the output of a rank may say more of its failure than the exit: it was aborted, or its engine has ended."""
    if exit.error is None:
        return exit.signal == signal.SIGABRT
    return bool(_ENGINE_DEAD.search(exit.error.message))


def reported_in(output: str, exit: Exit, wall_time: float) -> RankError | None:
    """Return the rank's error with the exhausted memory that its output reports; None if it reports none.

    Args:
        output: its end.
        exit: of the rank; `needs_output` is true of it.
        wall_time: when the exit was seen, in seconds since the epoch, for a rank that has left no error.
    """
    found = _of_engine(output) if exit.error is not None else _thrown(output)
    if found is None:
        return None
    if exit.error is None:
        return RankError(
            type=found.types[0].rpartition(".")[2],
            message=found.message,
            traceback="",
            location=None,
            wall_time=wall_time,
            chain=(found,),
        )
    return replace(exit.error, chain=(*exit.error.chain, found))


def _thrown(output: str) -> RaisedError | None:
    """What the C++ runtime says has ended the process."""
    reports = list(_THROWN.finditer(output))
    if not reports:
        return None
    last = reports[-1]
    if last["type"] == _BAD_ALLOCATION:
        return RaisedError(types=("builtins.MemoryError",), message=_BAD_ALLOCATION)
    message = _WATCHDOG_PREFIX.sub("", last["what"] or "", count=1)
    return _if_exhausted(RaisedError(types=("builtins.RuntimeError",), message=message))


def _of_engine(output: str) -> RaisedError | None:
    """The first exhausted memory in the log of an engine; later errors follow from it."""
    for line in _ENGINE_ERROR.finditer(output):
        name = line["type"] if "." in line["type"] else f"builtins.{line['type']}"
        found = _if_exhausted(RaisedError(types=(name,), message=line["message"]))
        if found is not None:
            return found
    return None


def _if_exhausted(raised: RaisedError) -> RaisedError | None:
    return raised if recognize(raised.types, raised.message) is not None else None
