"""Report and journal that a script trains with neither a Trainer nor a loop.

Said once, when a rank has taken its first optimizer step with no Trainer and no loop: what a restart does,
and that nothing is saved. Called at each poll; decides nothing.
"""

from __future__ import annotations

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.lifecycle import TRANSITIONS, Lifecycle, RunEvent
from grpo_run.runtime.history.no_trainer_script import ANEW, CONSEQUENCE
from grpo_run.runtime.history.reporter import Reporter


class NoTrainerWatch:
    """Watches the ranks of one run for training of their own.

    Args:
        lifecycle: is `running` once the script trains.
        reporter: for events and messages.
    """

    def __init__(self, lifecycle: Lifecycle, reporter: Reporter, history: History) -> None:
        self._lifecycle = lifecycle
        self._reporter = reporter
        self._history = history
        self._said = False
        self._said_of_call = False
        self._alone = False

    def begin_attempt(self) -> None:
        """A new attempt begins."""
        self._alone = False

    def poll(self) -> None:
        """Say what has changed; the ranks' events have been read."""
        own = self._history.no_trainer
        if own.current != self._alone:
            self._alone = own.current
            call = self._history.calls.interrupted
            if own.current:
                self._begin()
            elif call is not None and not self._said_of_call:
                self._said_of_call = True
                self._reporter.notify(f"{call.place} begins: its steps are counted and saved")

    def _begin(self) -> None:
        if (self._lifecycle.state, RunEvent.trains_without_trainer) in TRANSITIONS:
            self._lifecycle.fire(RunEvent.trains_without_trainer)
        if self._said:
            return
        self._said = True
        own = self._history.no_trainer
        consequence = CONSEQUENCE
        if len(self._history.calls):
            consequence = f"{ANEW} and restores its finished train() calls; what follows them is not saved"
        self._reporter.notify(f"{own.what_trains()}: {consequence}")
