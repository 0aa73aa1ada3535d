"""How far each rank is in the collectives of each process group, for the metrics.

Asked of the ranks' Flight Recorders, whose answers take them 4 to 10 ms in a thread of C++, so only while
somebody reads the metrics: a reading starts a poll in a thread of its own, waits for nothing, and returns
what the poll before has found. Sequence numbers are taken from the entries, because torch's own summary
(`pg_status`) numbers groups differently on each rank, and its last completed one may go back. Used by
`detector.py`. Judges nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from grpo_run.runtime.supervisor.detection._collective_records import (
    FLIGHT_RECORDER_HANDLER,
    NCCL_RECORDER_HANDLER,
    Requests,
)
from grpo_run.watchdog.deadlocks.recording import group_positions, parse_recording

HANDLERS = (FLIGHT_RECORDER_HANDLER, NCCL_RECORDER_HANDLER)
POLL_SECONDS = 5.0
"""Least time between two polls."""
OLD_SECONDS = 120.0
"""A result of this age is not shown: Prometheus asks once per minute at least."""

Positions = dict[str, tuple[int, int]]
"""The last enqueued and the last completed sequence number, by process group."""


class CollectiveProgressPoller:
    """Poller of the ranks of this node; one for all attempts.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._polling = threading.Lock()
        self._asked_at = -POLL_SECONDS
        self._requests = Requests()
        self._known: dict[str, Positions] = {}
        """By socket, also of groups whose entries have left the recorder's ring since."""
        self._answered: tuple[float, dict[str, Positions]] = (0.0, {})
        """When the last poll ended, and what was known then of each socket that answered."""

    def latest(self, sockets: Mapping[int, str]) -> dict[int, Positions]:
        """Return what the last poll has found, by rank, and begin another one if that is due.

        A rank that did not answer, or has been replaced since, is absent. Does not wait.

        Args:
            sockets: paths of the worker servers' sockets, by rank; others in each attempt.
        """
        sockets, now = dict(sockets), self._clock()
        if sockets and now - self._asked_at >= POLL_SECONDS and self._polling.acquire(blocking=False):
            self._asked_at = now
            threading.Thread(
                target=self._poll, args=(sockets,), name="grpo-run-collectives", daemon=True
            ).start()
        ended_at, answered = self._answered
        if now - ended_at > OLD_SECONDS:
            return {}
        return {rank: answered[path] for rank, path in sockets.items() if path in answered}

    def _poll(self, sockets: Mapping[int, str]) -> None:
        try:
            known: dict[str, Positions] = {path: dict(self._known.get(path, {})) for path in sockets.values()}
            answered = set()
            for handler in HANDLERS:
                answers, _ = self._requests.ask(handler, sockets)
                for rank, text in answers.items():
                    try:
                        found = group_positions(parse_recording(text))
                    except ValueError:
                        continue  # the detector reports it
                    positions = known[sockets[rank]]
                    for group, position in found.items():
                        before = positions.get(group, position)
                        positions[group] = max(before[0], position[0]), max(before[1], position[1])
                    answered.add(sockets[rank])
            self._known = known
            self._answered = self._clock(), {path: known[path] for path in answered}
        finally:
            self._polling.release()
