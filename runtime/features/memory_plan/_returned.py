"""Whether the GPUs' memory has been returned after an out-of-memory error, before the next attempt starts.

A process that was killed gives its memory back a moment later, and one that nobody knew of keeps it: the next
attempt would then run out of memory for another's sake, and the plan would be changed for nothing. Called by
`supervisor.py`. Ends no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.watchdog.evidence.node_memory import BackgroundCall, read_gpu_memory
from grpo_run.watchdog.text import size_text

RETURN_SECONDS = 20.0
"""How long the next attempt waits for memory. A driver takes a second or two to tear down a large process."""
READ_SECONDS = 2.0
"""How long one reading may take: a driver can hang."""
POLL_SECONDS = 0.2
SLACK_BYTES = 256 << 20
"""What may be in use in addition: about what the driver and other users' small processes need."""

Reading = Mapping[int, int]
"""Bytes in use by index of the GPU."""


class ReturnedMemory:
    """What the GPUs of this node had in use before the run's ranks started.

    Args:
        read: returns what `read_gpu_memory` does.
        visible: indexes of the GPUs that the ranks use; None for all.
    """

    def __init__(
        self,
        *,
        read: Callable[[], Mapping[str, Any]] = read_gpu_memory,
        visible: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read
        self._visible = visible
        self._clock = clock
        self._sleep = sleep
        self._first = BackgroundCall(dict)

    def begin(self) -> None:
        """Note what is in use now. Returns at once: the first ranks need seconds until they use a GPU."""
        self._first = BackgroundCall(self._read)

    def wait(self) -> str:
        """Wait until the memory is back, for `RETURN_SECONDS` at most.

        Returns:
            what is still in use, as a sentence; empty if nothing is, or if it cannot be known.
        """
        before = self._result(self._first)
        if not before:
            return ""
        deadline = self._clock() + RETURN_SECONDS
        while True:
            now = self._result(BackgroundCall(self._read)) or {}
            more = {index: used - before.get(index, 0) for index, used in now.items()}
            held = {index: size for index, size in more.items() if size > SLACK_BYTES}
            if not held:
                return ""
            if self._clock() >= deadline:
                gpus = ", ".join(f"{size_text(size)} of GPU {index}" for index, size in sorted(held.items()))
                return (
                    f"{gpus} did not become free within {RETURN_SECONDS:g} s after the ranks had ended:"
                    " another process uses the memory, and the next attempt has less of it"
                )
            self._sleep(POLL_SECONDS)

    def _result(self, call: BackgroundCall) -> Reading | None:
        """Return what is in use by a reading; None if the driver does not say."""
        call.join(time.monotonic() + READ_SECONDS)
        found: Mapping[str, Any] = call.result or {}
        if "devices" not in found:
            return None
        return {
            int(device["index"]): int(device["used_bytes"])
            for device in found["devices"]
            if self._visible is None or device["index"] in self._visible
        }


def visible_gpus(variable: str | None) -> frozenset[int] | None:
    """Return the indexes in a value of `CUDA_VISIBLE_DEVICES`; None for all, also if it names GPUs
    otherwise.
    """
    if variable is None:
        return None
    names = [name.strip() for name in variable.split(",") if name.strip()]
    return frozenset(map(int, names)) if all(name.isdigit() for name in names) else None
