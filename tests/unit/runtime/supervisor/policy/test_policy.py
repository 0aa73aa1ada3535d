"""What follows a failure, and whether a run has finished; see the text file."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from support.builders.runtime.failure_stories import (
    BUG,
    KILLED,
    NO_START,
    SLOW_JUDGE,
    STALL,
    history,
    verdict,
)
from support.builders.watchdog.slots import make_slot
from support.journal import as_event
from support.transcripts import Story, stories

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide, has_finished, start_of, why_not_finished
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.observation import Alarm, RankState
from grpo_run.watchdog.verdict import Location, RewardFunction, Verdict

FIRST = replace(NO_START, exception="ImportError")
"""An exception of the script, by its class."""
JUDGE = RewardFunction(file="/me/train.py", function="judge", raised=True)
KNOWN = {
    "killed": KILLED, "bug": BUG, "start": NO_START, "stall": STALL, "judge": SLOW_JUDGE,
    "lost": verdict(cause=Cause.node_lost, signature="node_lost"), "first": replace(FIRST, step=0),
    "loads": replace(FIRST, location=Location(file="/w/train.py", line=40, function="main")),
    "connection": verdict(
        cause=Cause.exception, signature="s", deterministic=True, origin=Origin.network
    ),
    "limit": replace(FIRST, step=0, failed_reward=replace(JUDGE, raised=False)),
    "raises": replace(FIRST, step=0, failed_reward=JUDGE),
    "alarm": replace(BUG, alarm=Alarm(cause="nonfinite", step=7, sentence="Wrong.", signature=BUG.signature)),
}  # fmt: skip
"""Faults by name; another name is a signature."""
ANSWERS = {
    "differs": Decision(action="answer_of_a_feature", reason="the next attempt differs"),
    "back": Decision(action="roll_back", reason="to before the onset", before_step=5),
    "ends": Decision(action=Action.stop, reason="the guard ends the run"),
}


class PolicyShell:
    """A run that has taken a step, with the default budget of three."""

    def __init__(self) -> None:
        self.history = history([])
        self.now = 1000.0
        self.budget = Budget()
        self.options: dict[str, Any] = {}

    def untrained(self) -> None:
        """A run without a step."""
        self.history = history([], trained=False)

    def given(self, answer: str = "", budget: str = "3", **options: str) -> None:
        """The answer of a feature, the budget, and what else decisions depend on."""
        self.options = {name: value == "yes" for name, value in options.items()}
        if answer:
            self.options["answer"] = ANSWERS[answer]
        self.budget = Budget(failures_without_progress=int(budget))

    def event(self, name: str, **fields: str) -> None:
        """Something happens."""
        values = {key: json.loads(value) if value.isdigit() else value for key, value in fields.items()}
        self.history.apply(as_event({"event": name, "time": self.now, **values}))

    def wait(self, seconds: str) -> None:
        """Time passes."""
        self.now += float(seconds)

    def fails(self, *words: str, **changes: str) -> str:
        """Failures and steps of newer checkpoints; what follows the last failure, with changes of it."""
        for word in words[:-1]:
            if word.isdigit():
                self.event("checkpoint_published", step=word, train_call="1", path="p")
            else:
                self._incident(KNOWN.get(word, verdict(signature=word)))
        read: dict[str, Any] = {"cause": Cause, "origin": Origin, "step": int}
        what = replace(
            KNOWN[words[-1]], **{name: read.get(name, str)(text) for name, text in changes.items()}
        )
        self._incident(what)
        decision = decide(self.history, what, self.budget, **{"stopping": False, **self.options})
        action = {"event": "action", "action": str(decision.action), "patient": decision.patient}
        self.history.apply(as_event({"time": self.now, **action}))
        self.last = decision
        return f"{decision.action}: {decision.reason}"

    def _incident(self, what: Verdict) -> None:
        record = {
            "event": "incident", "time": self.now, "failed_at": self.now, "cause": str(what.cause),
            "step": what.step, "signature": what.signature, "repeat_key": what.repeat_key,
            "starting": what.starting,
        }  # fmt: skip
        self.history.apply(as_event(record))

    def keeps_failing(self, seconds: str, origin: str = "network") -> str:
        """Starts fail for so long, each 2 s after the delay of the last decision: delays, and the end."""
        delays, until = [], self.now + float(seconds)
        while self.now < until:
            signature = f"ConnectionError@hub.py:{len(delays) % 2}:step0"
            said = self.fails("start", origin=origin, signature=signature)
            if self.last.action is Action.stop:
                break
            delays.append(self.last.delay_seconds)
            self.wait(str(2.0 + self.last.delay_seconds))
        alike = ((delay, len(list(group))) for delay, group in groupby(delays))
        return f"delays {' '.join(f'{delay:g}*{count}' for delay, count in alike)}\n{said}"

    def keeps_losing_hosts(self, times: str, every: str) -> str:
        """A host is lost so often, so many seconds apart: how often the run goes on, and what follows."""
        restarts = 0
        for _ in range(int(times)):
            said = self.fails("lost")
            restarts += self.last.restarts
            self.wait(every)
        return f"{restarts} restarts\n{said}"

    def failures(self) -> str:
        """The failures that count against the budget."""
        return str(self.history.failures_without_progress)

    def announced(self) -> str:
        """Where a restart begins, as it is said."""
        return start_of(self.history)

    def ends(self, unsaved: str = "", refused: str = "", left_out: str = "") -> str:
        """Why a run at step 6 has not finished."""
        return (
            why_not_finished(History(step=6), unsaved=unsaved, refused=refused, left_out=left_out) or "it has"
        )

    def hangs(self, states: str, *earlier: str) -> str:
        """Whether a run whose ranks are so has finished, although a thread hangs now."""
        slots = [make_slot(rank, state=RankState[one]) for rank, one in enumerate(states.split(",")) if one]
        told = history([*(f"!{name}" for name in earlier), "!thread"])
        return "finished" if has_finished(slots, told, "thread") else "not finished"


@stories(__file__, "policy.txt")
def test_policy(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(PolicyShell(), word)


def test_only_a_start_that_failed_is_delayed() -> None:
    """And whether a rank can be killed is known only later."""
    decision = decide(history(["!killed"]), KILLED, Budget(), stopping=False)
    assert (decision.delay_seconds, decision.patient) == (0.0, False)
    stuck = replace(KILLED, uninterruptible=True)
    assert decide(history(["!killed"]), stuck, Budget(), stopping=False) == decision


def test_a_negative_budget_is_refused() -> None:
    """The error is one that the user can correct."""
    with pytest.raises(ConfigError, match="-1"):
        Budget(failures_without_progress=-1)


def test_a_host_without_rank_0_sees_progress_where_its_ranks_resume() -> None:
    """It is not told of checkpoints, and would give the run up after a few faults of a week."""
    made = History.of([])
    for number in range(6):
        for event in (
            {"event": "attempt_started", "attempt": number, "world_size": 2, "node": 1},
            {"event": "train_started", "train_call": 1, "rank": 1, "step": 10 * number},
            {"event": "step_committed", "train_call": 1, "step": 10 * number + 12},
            {"event": "incident", "cause": "signal", "step": 10 * number + 13, "signature": f"at {number}"},
        ):
            made.apply(as_event({"time": 1000.0 + number, **event}))
        assert made.failures_without_progress == 1
        assert decide(made, verdict(), Budget(failures_without_progress=1), stopping=False).restarts
