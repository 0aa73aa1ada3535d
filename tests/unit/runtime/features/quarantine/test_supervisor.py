"""Which faults put prompts into quarantine, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.failure_stories import BUG, KILLED, SLOW_JUDGE, STALL
from support.journal import event, read_records

from grpo_run.runtime.features.quarantine._files import RecordedRollout, write_rollout
from grpo_run.runtime.features.quarantine.events import PART as HISTORY
from grpo_run.runtime.features.quarantine.events import PromptDigest, RolloutPosition
from grpo_run.runtime.features.quarantine.supervisor import PART
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict

PROMPTS = [PromptDigest(sha256=letter * 64, preview=letter) for letter in "ab"]


class Quarantined:
    """A run whose last fault was in step 8 of its first call; ranks 0 and 1 have recorded its prompts."""

    def __init__(self, config: RunConfig) -> None:
        path = Path(config.run_directory)
        self.run = RunDirectory(path=path)
        self.run.create()
        self.live = LiveHistory(self.run.journal, "run", parts=[HISTORY()])
        self.said: list[str] = []
        reporter = Reporter(self.live, str(path), self.said.append)
        self.feature = PART(config, self.run, self.live.history, reporter)
        self.live.write(event("incident", step=7, train_call=1, cause="exception", culprit=1))
        self.files = AttemptFiles(self.run, 1)
        assert self.files.make() is None
        self.feature.begin_attempt(0)
        position = RolloutPosition(train_call=1, step=8)
        for rank, prompt in enumerate(PROMPTS):
            told = self.feature.rank_settings(rank, self.files)
            assert told is not None
            write_rollout(Path(told["file"]), RecordedRollout(position=position, prompts=(prompt,)))

    def answer(self, verdict: Verdict, phase: str | None = "generate", ranks: tuple[int, ...] = (1,)) -> Any:
        """What is offered against a fault."""
        self.live.write(event("incident", step=7, train_call=1, cause="exception", culprit=1))
        fault = Fault(verdict=replace(verdict, phase=phase), failed_ranks=ranks, files=self.files)
        return self.feature.answer(fault)


@pytest.fixture
def run(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Quarantined:
    """A new run."""
    return Quarantined(make_config(run_directory=tmp_path / "run"))


@pytest.mark.parametrize(
    ("phase", "says"), [("generate", "generation has failed twice"), ("reward", "rewards have failed twice")]
)
@pytest.mark.parametrize("what", [BUG, STALL, SLOW_JUDGE])
def test_prompts_leave_after_the_same_failure_on_their_rollout(
    run: Quarantined, what: Verdict, phase: str, says: str
) -> None:
    """Those of the ranks that failed, and no others."""
    answer = run.answer(what, phase, ranks=(1, 1))
    assert isinstance(answer, Answer)
    assert answer.decision.action == "quarantine_batch"
    assert says in answer.decision.reason
    assert not (run.run.path / "quarantine.json").exists()
    answer.act()
    listed = json.loads((run.run.path / "quarantine.json").read_text())
    assert [(one["preview"], one["train_call"], one["from_step"]) for one in listed] == [("b", 1, 8)]
    assert [one["event"] for one in read_records(run.run.journal)][-1] == "prompt_quarantined"
    assert "1 prompt is replaced from step 8 on" in run.said[-1]


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("kills may be anyone's", lambda: (KILLED, "generate")),
        ("no phase of a prompt", lambda: (BUG, "forward_backward")),
        ("no phase", lambda: (BUG, None)),
        ("ranks that disagree", lambda: (replace(BUG, cause=Cause.collective_mismatch), "generate")),
        ("another step", lambda: (replace(BUG, step=9), "generate")),
    ],
)
def test_no_other_failure_is_that_of_a_prompt(
    run: Quarantined, why: str, change: Callable[[], tuple[Verdict, str | None]]
) -> None:
    """Replacing prompts changes the training."""
    assert run.answer(*change()) is None, why


def test_prompts_that_are_not_known_stay(run: Quarantined) -> None:
    """The rank was killed before it could record them."""
    assert run.answer(BUG, ranks=(2,)) is None


def test_a_rollout_is_replaced_once(run: Quarantined) -> None:
    """If it fails again, it was not the prompts."""
    run.answer(BUG).act()
    assert run.answer(BUG, ranks=(0,)) is None
    told = run.feature.rank_settings(0, run.files)
    assert told is not None
    assert told["prompts"] == []
    run.feature.begin_attempt(0)
    told = run.feature.rank_settings(0, run.files)
    assert told is not None
    assert [one["preview"] for one in told["prompts"]] == ["b"]
