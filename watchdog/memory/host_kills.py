"""Which ranks the kernel has killed for lack of memory, from its counters of killed processes.

A rank that was killed by SIGKILL may have been killed by anybody. The counter of its memory cgroup is read at
every poll: if it has risen since the poll before the rank's exit was seen, or rose while the rank was already
dying, the kernel has killed it. A large process takes seconds to exit, so that its counter may rise several
polls before its exit is seen. Pure; the caller reads. Makes no verdicts (`watchdog.diagnosis._host_oom`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse

HELPER_SECONDS = 60.0
"""How long before a rank's exception one of its helpers may have been killed. A data loader notices within 5
s (`torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL`), a rank on a loaded machine some seconds later.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """The counter of a cgroup has risen between two polls, the later of which is number `poll`.

    `dying` are the ranks that were exiting then.
    """

    poll: int
    at: float
    before: int
    now: int
    dying: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelKills:
    """What the counters show of the ranks that have exited, with the last sample before.

    Attributes:
        ranks: ranks that the kernel has killed.
        dying: ranks that were exiting when it killed a process, whose exit was not seen yet.
        helper_killed: it has recently killed another process of the run.
        before, now: the counter.
        sample: the last one in which all ranks ran; None if there is none.
        reached: the limit that was reached, as it was used in that sample; None if that is not known.
        sample_age_seconds: of that sample when the kill was seen.
    """

    ranks: frozenset[int] = frozenset()
    dying: frozenset[int] = frozenset()
    helper_killed: bool = False
    before: int = 0
    now: int = 0
    sample: HostSample | None = None
    reached: LimitUse | None = None
    sample_age_seconds: float = 0.0


class KillWatch:
    """Follows the counter of the ranks' cgroup during one attempt."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, count: int | None) -> None:
        """Begin an attempt with the present value of the counter; None if there is no counter."""
        self._count = count
        self._poll = 0
        self.rises: list[Rise] = []

    def record(
        self, count: int | None, now: float, dying: Callable[[], frozenset[int]], *, again: bool = False
    ) -> None:
        """Record the counter at a poll.

        Args:
            count: None if it could not be read.
            now: monotonic seconds.
            dying: returns the ranks that are exiting.
            again: it was read once more during the last poll, which has seen a failure.
        """
        self._poll += not again
        if count is None:
            return
        if self._count is not None and count > self._count:
            self.rises.append(Rise(poll=self._poll, at=now, before=self._count, now=count, dying=dying()))
        self._count = count

    def killed(self, ranks: Collection[int]) -> frozenset[int]:
        """Return those of `ranks`, whose exit by SIGKILL was seen at the last poll, that the kernel has
        killed.
        """
        return frozenset(
            rank
            for rank in ranks
            if any(rise.poll == self._poll or rank in rise.dying for rise in self.rises)
        )

    def dying(self, exited: Collection[int]) -> frozenset[int]:
        """Return the ranks that were exiting at a rise, without those whose exit was seen."""
        return frozenset[int]().union(*(rise.dying for rise in self.rises)).difference(exited)

    def helper_killed(self, now: float) -> bool:
        """Return whether the counter has recently risen, so that a helper of a rank may have been killed."""
        return any(now - rise.at <= HELPER_SECONDS for rise in self.rises)

    def counts(self) -> tuple[int, int]:
        """Return the counter before the first rise and after the last one."""
        return (self.rises[0].before, self.rises[-1].now) if self.rises else (0, 0)


def reached_limit(before: Sequence[LimitUse], now: Sequence[LimitUse]) -> LimitUse | None:
    """Return the limit that allocations have met between two samples, as it was in the first; None if none is
    known to be.

    Without one of a cgroup it is the machine's. Of several it is the one whose working set took the largest
    share.
    """
    hits = {use.name: use.hits for use in before if use.hits is not None}
    met = [use for use in now if use.hits is not None and use.hits > hits.get(use.name, use.hits)]
    if met:
        name = max(met, key=lambda use: use.fraction).name
        return next(use for use in before if use.name == name)
    return next((use for use in before if use.hits is None), None)
