"""The points at which features take part in the supervisor.

In this order: when an attempt is prepared, `begin_attempt`, then `rank_environment` and `rank_settings` for
each rank; while ranks run, `poll` and `fault`; after a fault of the ranks, `explain`, and once the verdict is
final, `answer`; when the run ends, `end_remark` and `end`. Features are asked in the order of
`runtime.features.FEATURES`, and the first answer counts. `supervisor.py`, `faults.py` and `outcome.py` call
them. Plain data, and methods that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_run.runtime.errors import EXIT_GAVE_UP
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is to be decided on.

    Attributes:
        verdict: what has happened.
        failed_ranks: the culprits, and ranks that failed by themselves besides them.
        files: of the attempt that has failed.
        on_several_nodes: other nodes have ranks too.
        local_ranks: of this node.
    """

    verdict: Verdict
    failed_ranks: tuple[int, ...]
    files: AttemptFiles
    on_several_nodes: bool = False
    local_ranks: Collection[int] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a feature decides on a fault, or offers after its alarm, or against a fault that a restart
    would only repeat.

    Attributes:
        decision: taken after an alarm, or in place of giving the run up, if the budget allows a restart.
        act: called once the decision is in the journal, before the next attempt.
        at_once: the decision is taken, whatever the policy would decide, unless a stop was requested or the
            settings are wrong.
        exit_code: of the run, if the decision ends it.
        leaves: the decision ends the run on this node alone; the others go on without it.
    """

    decision: Decision
    act: Callable[[], None] = lambda: None
    at_once: bool = False
    exit_code: int = EXIT_GAVE_UP
    leaves: bool = False


@dataclass(frozen=True, kw_only=True)
class EndRemark:
    """What a feature says at the end of a run.

    Attributes:
        text: sentences, which are also a warning in the journal.
        unfinished: why the run has not finished although its scripts have run to their end, as the end of a
            sentence; empty if it has.
    """

    text: str
    unfinished: str = ""


class SupervisorFeature:
    """A feature in the supervisor of one run. It overrides the points at which it takes part; the
    others do nothing.
    """

    name: ClassVar[str]
    """Under which its part in a rank finds its settings."""

    def begin_attempt(self, node: int) -> None:
        """Prepare an attempt; no rank of it runs yet. May wait: a signal that stops the run ends the wait by
        an exception.

        Args:
            node: number of this node among those of the run.

        Raises:
            ProcessError: the attempt cannot be started.
        """

    def rank_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return further variables of the ranks.

        Args:
            environment: theirs without these.
        """
        return {}

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return the JSON values that the feature's part in a rank gets; None for nothing."""
        return None

    def poll(self) -> None:
        """Several times a second while ranks run. What they have written to the journal is in the history."""

    def fault(self, slots: Mapping[int, Slot | None]) -> Verdict | None:
        """Return a fault outside the ranks that they cannot survive. Asked when `poll` is, whether ranks have
        failed or not.

        Args:
            slots: of the ranks of this node.
        """
        return None

    def explain(self, verdict: Verdict) -> Verdict | None:
        """Return the verdict on what has caused a fault of the ranks, if that lies outside them.

        Args:
            verdict: as the ranks show it.
        """
        return None

    def end(self) -> None:
        """The run has ended, in whatever way. Called once."""

    def answer(self, fault: Fault) -> Answer | None:
        """Return what can be done against a fault, which the history contains as its last recovery.

        Called once for each fault, whatever is decided.
        """
        return None

    def end_remark(self, exit_code: int, ranks: Collection[int]) -> EndRemark | None:
        """Return what to say at the end of the run; the history contains everything but that.

        Args:
            exit_code: as decided so far.
            ranks: global ranks of this node; empty if no rank was ever started.
        """
        return None


FeatureFactory = Callable[[RunConfig, RunDirectory, History, Reporter], SupervisorFeature]
"""Makes a feature's part for one run. Raises `RunDirectoryError` for a file of the user that is not valid."""
