"""Which reward functions are moved to workers, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.failure_stories import BUG
from support.journal import event, read_records

from grpo_run.runtime.features.reward_workers.events import PART as HISTORY
from grpo_run.runtime.features.reward_workers.supervisor import PART
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault
from grpo_run.watchdog.stalls.durations import Durations

JUDGE = {"file": "/me/train.py", "function": "judge"}
OTHER = {"file": "/me/train.py", "function": "other"}
RAISED = {**JUDGE, "raised": True}
Events = list[tuple[str, dict[str, Any]]]


def incident(
    failed: dict[str, Any] | None = JUDGE, step: int = 7, call: int = 1
) -> tuple[str, dict[str, Any]]:
    fields = {"cause": "reward_stall", "step": step, "train_call": call, "failed_reward": failed}
    return "incident", fields


MOVED = "reward_moved", JUDGE


class Supervised:
    """A run with these events in its journal."""

    def __init__(self, path: Path, events: Events, workers: int = 0, budget: int = 3) -> None:
        self.run = RunDirectory(path=path)
        self.run.create()
        self.live = LiveHistory(self.run.journal, "run", parts=[HISTORY()])
        self.said: list[str] = []
        config = RunConfig(
            run_id="run", run_directory=path, target="t", module=False, arguments=(), command=(),
            features={"reward_workers": {"workers": workers}},
            budget=Budget(failures_without_progress=budget),
        )  # fmt: skip
        self.feature = PART(config, self.run, self.live.history, Reporter(self.live, "", self.said.append))
        for name, fields in events:
            self.live.write(event(name, **fields))

    def answer(self) -> Answer | None:
        """What is offered against the last fault."""
        return self.feature.answer(Fault(verdict=BUG, failed_ranks=(0,), files=AttemptFiles(self.run, 0)))

    def told(self) -> Any:
        """What a rank of the next attempt is told."""
        return self.feature.rank_settings(0, AttemptFiles(self.run, 1))


@pytest.mark.parametrize(
    ("events", "due"),
    [
        ([incident()], False),
        ([incident(), incident()], True),
        ([incident(), incident(step=8)], False),
        ([incident(), incident(call=2)], False),
        ([incident(), incident(OTHER)], False),
        ([incident(), incident(OTHER), incident()], True),
        ([incident(), incident(), incident(None)], False),
        ([incident(), incident(), MOVED], False),
        ([incident(), incident(), MOVED, incident()], False),
        ([incident(), incident(), ("reward_moved", {"function": "*"})], False),
        ([incident(RAISED), incident(RAISED)], True),
        ([incident(RAISED, step=0), incident(RAISED, step=0)], False),
        ([incident(step=0), incident(step=0)], True),
    ],
)
def test_a_function_is_moved_after_its_second_failure_at_one_step(
    tmp_path: Path, events: Events, due: bool
) -> None:
    """Whether or not the failure repeats. One that has only ever raised is broken, and is not moved."""
    run = Supervised(tmp_path / "run", events)
    answer = run.answer()
    assert (answer is not None) is due
    if answer is not None:
        assert (answer.decision.action, answer.at_once) == (Action.restart, True)
        answer.act()
        assert run.told()["moved"] == [JUDGE]
        assert run.answer() is None
        *_, record = read_records(run.run.journal)
        assert (record["event"], record["step"], record["failures"]) == ("reward_moved", BUG.step, 2)
        what = (
            "raised"
            if RAISED in [fields["failed_reward"] for _, fields in events]
            else "not returned in time"
        )
        assert run.said[0].startswith(f"reward function judge has {what} 2 times at one step: the next")


def test_the_user_is_told_in_the_words_of_the_script(tmp_path: Path) -> None:
    run = Supervised(tmp_path / "run", [incident(step=0), incident(step=0)])
    verdict = replace(BUG, traceback="Traceback ...\n  at\nTimeoutError: 6 (of 8) futures unfinished\n")
    answer = run.feature.answer(Fault(verdict=verdict, failed_ranks=(0,), files=AttemptFiles(run.run, 0)))
    assert answer is not None
    answer.act()
    words = "at one step (TimeoutError: 6 (of 8) futures unfinished): the next attempt runs it in a worker"
    assert words in run.said[0]


def test_moved_functions_stay_moved_for_a_later_supervisor(tmp_path: Path) -> None:
    """And how long rewards have taken is known to their workers."""
    events: Events = [MOVED, MOVED, ("reward_moved", {"function": "*"})]
    events.append(("phase_learned", {"phase": "reward", "durations": Durations.of([2.0]).as_json()}))
    told = Supervised(tmp_path / "run", events).told()
    assert told["moved"] == [JUDGE, {"file": "", "function": "*"}]
    assert told["durations"] is not None


def test_a_rank_is_told_of_no_workers_that_it_does_not_need(tmp_path: Path) -> None:
    """It would fork their host. With `--reward-workers` it needs them from the start."""
    assert Supervised(tmp_path / "run", [incident()]).told() is None
    assert Supervised(tmp_path / "all", [], workers=2).told() == {"moved": [], "durations": None}


def test_a_function_that_has_stayed_in_the_rank_is_journaled_only(tmp_path: Path) -> None:
    """A warning has said why it stays."""
    run = Supervised(tmp_path / "run", [incident(), incident()], workers=1)
    answer = run.answer()
    assert answer is not None
    answer.act()
    assert run.said == []


def test_no_restart_is_asked_for_that_the_budget_does_not_have(tmp_path: Path) -> None:
    """With `--max-restarts 0`, and after as many failures as are recovered."""
    for budget, moved in ((0, False), (1, False), (2, True)):
        run = Supervised(tmp_path / str(budget), [incident(), incident()], budget=budget)
        assert (run.answer() is not None) is moved
