"""Report and journal that a script trains with neither a Trainer nor a loop.

Said once, when a rank has taken its first optimizer step with no Trainer and no loop: what a restart does, that nothing is
saved, and which injected faults cannot happen. Completed saves of the script's own are journaled. Called at each poll; decides
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.lifecycle import TRANSITIONS, Lifecycle, RunEvent
from grpo_run.runtime.history.own_training import ANEW
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.launch.injections import Injection, remaining
from grpo_run.runtime.supervisor.own_saves import OwnSaves
from grpo_run.watchdog.observation import Slot


class UnguardedWatch:
    """Watches the ranks of one run for training of their own.

    Args:
        injections: injected faults of the run.
        lifecycle: is `running` once the script trains.
        reporter: for events and messages.
        history: of the run.
        wall_clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        lifecycle: Lifecycle,
        reporter: Reporter,
        history: History,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._injections = tuple(injections)
        self._lifecycle = lifecycle
        self._reporter = reporter
        self._history = history
        self._wall_clock = wall_clock
        self._saves = OwnSaves()
        self._said = False
        self._said_of_saves = False
        self._said_of_call = False
        self._alone = False

    def begin_attempt(self) -> None:
        """A new attempt begins."""
        self._saves = OwnSaves()
        self._alone = False

    def poll(self, slots: Mapping[int, Slot | None], now: float, *, ended: bool = False) -> bool:
        """Read the board once; the ranks' events have been read.

        Args:
            now: monotonic seconds.
            ended: the ranks go no further.

        Returns:
            whether a save of the script's own has become complete.
        """
        own = self._history.own
        if own.current != self._alone:
            self._alone = own.current
            call = self._history.calls.interrupted
            if own.current:
                self._begin()
            elif call is not None and not self._said_of_call:
                self._said_of_call = True
                self._reporter.notify(f"{call.place} begins: its steps are counted and saved")
        if not self._saves.observe(slots, now, ended=ended):
            return False
        self._reporter.write("own_checkpoint", path=own.newest_path, saved_at=self._wall_clock())
        if not self._said_of_saves:
            self._said_of_saves = True
            self._reporter.notify(
                f"the script saves its own state{f' in {own.newest_path}' if own.newest_path else ''}: this counts as progress,"
                " and a stop waits for the next time; whether it resumes from there is up to the script"
            )
        return True

    def _begin(self) -> None:
        if (self._lifecycle.state, RunEvent.trains_alone) in TRANSITIONS:
            self._lifecycle.fire(RunEvent.trains_alone)
        if self._said:
            return
        self._said = True
        own = self._history.own
        consequence = own.consequence(self._wall_clock())
        if len(self._history.calls):
            consequence = f"{ANEW} and restores its finished train() calls; what follows them is not saved"
        self._reporter.notify(f"{own.what_trains()}: {consequence}")
        faults = remaining(self._injections, self._history.injections_fired)
        if faults:
            self._reporter.notify(
                f"injected faults need counted steps, so without a Trainer or a loop they cannot happen:"
                f" {', '.join(map(str, faults))}"
            )
