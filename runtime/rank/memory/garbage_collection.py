"""Keeps Python's automatic garbage collection out of the phases of a step, and restores what the script has
set.

A collection in one rank's backward pass makes all ranks wait. The threshold of the youngest generation is
raised while such a phase runs, so the objects of the phase are looked at when it ends. What the script
chooses is left alone: a script that has called `gc.disable()`, has set a threshold as high, or sets one
inside a phase, keeps it; `gc.isenabled()` and `gc.freeze()` are not affected. A phase that lasts longer than
a second has automatic collection again, because garbage may hold tensors. Driven by the session; collects
nothing itself (`cleanup.py`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from grpo_run.watchdog.observation import Phase

TIMED = frozenset(
    {Phase.generate, Phase.score, Phase.reward, Phase.forward_backward, Phase.optimizer, Phase.vote}
)
"""Phases without automatic collection. In the others user code may run for long: data loading, callbacks,
evaluation.
"""
RAISED = 20_011
"""Objects that a phase may create, and not free, before a collection begins after all. Python's default is
700. A collection of so many takes 2 to 5 ms."""
LONGEST_SECONDS = 1.0


class AutomaticCollection:
    """Raises and restores the threshold. Used by the rank's main thread, and `beat` by its heartbeat.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._own: tuple[int, int, int] | None = None
        """What the script has set, while it is raised."""
        self._raised: tuple[int, int, int] | None = None
        self._since = 0.0

    def changed(self, begun: Phase | None) -> None:
        """Another phase runs from now on; None for no phase."""
        if begun in TIMED:
            if self._own is None:
                self._hold()
        elif self._own is not None:
            self.restore()

    def beat(self) -> None:
        """Let automatic collection begin again if it has been held for long. Called about once per second, by
        any thread.
        """
        if self._own is not None and self._clock() - self._since > LONGEST_SECONDS:
            self.restore()

    def restore(self) -> None:
        """Set what the script has set, unless it has changed that meanwhile."""
        own, self._own = self._own, None
        if own is not None and gc.get_threshold() == self._raised:
            gc.set_threshold(*own)

    def _hold(self) -> None:
        own = gc.get_threshold()
        if not gc.isenabled() or not 0 < own[0] < RAISED:
            return
        self._raised = (RAISED, *own[1:])
        self._since = self._clock()
        gc.set_threshold(*self._raised)
        self._own = own
