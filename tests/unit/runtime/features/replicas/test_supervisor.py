"""Ranks that differ go back once; a second time ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.replicas.events import PART as HISTORY
from grpo_run.runtime.features.replicas.events import ReplicaNamed
from grpo_run.runtime.features.replicas.settings import Difference, RankReplicas, ReplicaSettings
from grpo_run.runtime.features.replicas.supervisor import PART
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Fault
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Alarm
from grpo_run.watchdog.verdict import Verdict


def _fault(
    run: RunDirectory, *ranks: int, cause: Cause = Cause.replicas_differ, hosts: int = 1, local: int = 0
) -> Fault:
    details = Difference(
        train_call=1, step=20, agreed=10, count=1, name="weight", position=5, bits=(1, 2), ranks=ranks
    )
    alarm = Alarm(
        cause=str(cause), step=20, sentence="They differ.", signature="x",
        details=details.model_dump(mode="json"),
    )  # fmt: skip
    verdict = Verdict(cause=cause, step=20, sentence="They differ.", signature="x", alarm=alarm)
    here = (0, 1) if hosts == 1 else (local,)
    return Fault(
        verdict=verdict, failed_ranks=(0, 1), files=AttemptFiles(run, 1), on_several_nodes=hosts > 1,
        local_ranks=here,
    )  # fmt: skip


def test_a_second_difference_ends_the_run(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    """The first one is told to the ranks of the next attempt until its rank is known."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    live = LiveHistory(run.journal, "run", parts=[HISTORY()])
    feature = PART(make_config(), run, live.history, Reporter(live, str(tmp_path), lambda text: None))
    files = AttemptFiles(run, 1)

    def told() -> Any:
        return RankReplicas.model_validate(feature.rank_settings(0, files)).open

    assert told() == ()
    assert feature.answer(_fault(run, cause=Cause.nonfinite)) is None
    first = feature.answer(_fault(run))
    assert first is not None
    assert first.decision.action is Action.restart_from_earlier_checkpoint
    assert first.decision.before_step == 11
    assert [one.step for one in told()] == [20]
    live.write(ReplicaNamed(rank=0, step=20, train_call=1, ranks=(1,)))
    assert told() == ()
    second = feature.answer(_fault(run, 1))
    assert second is not None
    assert second.decision.action is Action.stop
    assert live.history.part(HISTORY).named == [1, 1]


@pytest.mark.parametrize(
    ("ranks", "local", "action", "leaves"),
    [
        ((1,), 1, Action.stop, True),
        ((1,), 0, Action.restart_from_earlier_checkpoint, False),
        ((), 0, Action.stop, False),
    ],
)
def test_on_several_hosts_only_the_one_that_is_wrong_leaves(
    ranks: tuple[int, ...], local: int, action: Action, leaves: bool, tmp_path: Path,
    make_config: Callable[..., RunConfig],
) -> None:  # fmt: skip
    """Without a majority nobody knows which one it is: the run ends."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    live = LiveHistory(run.journal, "run", parts=[HISTORY()])
    feature = PART(make_config(), run, live.history, Reporter(live, str(tmp_path), lambda text: None))
    feature.answer(_fault(run, *ranks, hosts=3, local=local))
    second = feature.answer(_fault(run, *ranks, hosts=3, local=local))
    assert second is not None
    assert (second.decision.action, second.leaves) == (action, leaves)


def test_the_number_of_steps_is_checked() -> None:
    """0 is never."""
    assert ReplicaSettings(every=0).every == 0
    with pytest.raises(ConfigError, match="--compare-every must be 0"):
        ReplicaSettings(every=-1)
