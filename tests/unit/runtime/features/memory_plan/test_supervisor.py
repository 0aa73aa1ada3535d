"""The memory plan of a run: journaled, said, kept by the next launch, and passed to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event, read_records
from support.memory_cases import GRPO, facts, planned

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.features.memory_plan._remedy import Plan
from grpo_run.runtime.features.memory_plan.events import PART as HISTORY
from grpo_run.runtime.features.memory_plan.supervisor import PART
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.files import write_facts
from grpo_run.runtime.supervisor.points import Fault
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, Shortage
from grpo_run.watchdog.verdict import Verdict

CHANGE = "restart_with_plan_change"
GIB = 1 << 30


def out_of_memory(cause: Cause = Cause.gpu_oom) -> Verdict:
    return Verdict(
        cause=cause, culprits=(1,), step=3, phase="forward_backward", confidence="proved",
        sentence="It failed.",
        signature="gpu_oom:backward:step3", deterministic=True,
        shortage=Shortage(
            cause=cause, source=ErrorSource.allocator, phase=MemoryPhase.backward, text="CUDA out of memory.",
            figures=Figures(tried_bytes=2 * GIB, free_bytes=GIB),
        ),
    )  # fmt: skip


class Supervised:
    """The memory plan in a supervisor, with a real journal."""

    def __init__(self, directory: Path, given: Any = GRPO, plan: Plan | None = None, **options: Any) -> None:
        self.run = RunDirectory(path=directory)
        self.run.create()
        if given is not None:
            write_facts(directory, given)
        self.said: list[str] = []
        self.live = LiveHistory(self.run.journal, "run", parts=[HISTORY()])
        self.reporter = Reporter(self.live, str(directory), self.said.append)
        config = RunConfig(
            run_id="run", run_directory=directory, target="train.py", module=False, arguments=(), command=(),
            features={"memory_plan": {"plan": plan or {}}}, **options
        )  # fmt: skip
        self.config = config
        self.feature = PART(config, self.run, self.live.history, self.reporter)
        self.reporter.write(event("run_started"))

    @property
    def plan(self) -> Plan:
        return self.live.history.part(HISTORY).plan

    def fail(self, verdict: Verdict, *, nodes: bool = False) -> str | None:
        """Handle a fault as `faults.py` does; return the action, None if it is not that of the feature."""
        shortage = verdict.shortage.as_json() if verdict.shortage is not None else None
        self.reporter.write(
            event("incident", cause=str(verdict.cause), step=3, train_call=1, shortage=shortage)
        )
        files = AttemptFiles(self.run, 0)
        fault = Fault(verdict=verdict, failed_ranks=(1,), files=files, on_several_nodes=nodes)
        answer = self.feature.answer(fault)
        if answer is None:
            return None
        decision = answer.decision
        assert answer.at_once
        self.reporter.write(
            event("action", action=str(decision.action), reason=decision.reason, patient=decision.patient)
        )
        answer.act()
        return decision.action


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Supervised]:
    """Launch the run, or launch it again."""
    return lambda *arguments, **options: Supervised(tmp_path / "run", *arguments, **options)


Start = Callable[..., Supervised]


def test_a_change_is_journaled_with_everything_and_said_in_the_scripts_terms(start: Start) -> None:
    run = start(facts(dropout=True))
    assert run.fail(out_of_memory()) == CHANGE
    (event,) = [record for record in read_records(run.run.journal) if record["event"] == "plan_changed"]
    assert event["plan"] == {"micro_batch_divisor": 2}
    assert (event["fallback_step"], event["phase"], event["before"]) == ("micro_batch", "backward", {})
    assert event["inexact"] == ["dropout draws other random numbers"]
    assert run.said[0] == (
        "memory plan: per_device_train_batch_size 8 -> 4, gradient_accumulation_steps 1 -> 2"
    )
    assert "dropout" in run.said[-1]


def test_a_refusal_is_said_with_its_reason(start: Start) -> None:
    run = start(facts(loss_type="bnpo"))
    run.fail(out_of_memory())
    assert any("micro batch: loss_type='bnpo'" in sentence for sentence in run.said)


def test_a_later_launch_keeps_the_plan_and_goes_on_from_it(start: Start) -> None:
    start().fail(out_of_memory())
    second = start()
    assert second.plan == planned(micro_batch_divisor=2)
    second.fail(out_of_memory())
    assert second.plan == planned(micro_batch_divisor=4)
    assert second.live.history.failures_without_progress == 0, "the number of changes is the bound"


@pytest.mark.parametrize(
    "why", ["no shortage of a GPU", "no facts", "several nodes", "facts of another call"]
)
def test_other_faults_are_left_to_the_policy(start: Start, why: str) -> None:
    run = start(None if why == "no facts" else GRPO)
    if why == "facts of another call":
        call = {"train_call": 2, "target_steps": 9, "trainer_class": LOOP, "output_dir": "out"}
        run.reporter.write(event("train_started", rank=0, step=0, **call))
    cause = Cause.host_oom if "GPU" in why else Cause.gpu_oom
    assert run.fail(out_of_memory(cause), nodes=why == "several nodes") is None


def test_a_plan_reaches_the_ranks(start: Start) -> None:
    """In their settings and their environment."""
    plan = {"micro_batch_divisor": 2, "expandable_segments": True, "max_completion_length": 64}
    run = start()
    assert run.feature.rank_environment({}) == {}
    run.reporter.write(event("plan_changed", plan=plan))
    assert run.feature.rank_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,"}) == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert run.feature.rank_settings(0, AttemptFiles(run.run, 0)) == plan
    text = "micro-batch=2,expandable-segments,max_completion_length=64"
    assert run.live.history.facts() == {"memory plan": text}


@pytest.mark.parametrize("record", [{"plan": {"micro_batch_divisor": "many"}}, {"plan": {"of_next_year": 1}}])
def test_a_plan_that_cannot_be_read_leaves_the_last_one(record: dict[str, Any]) -> None:
    changes = [event("plan_changed", plan={"micro_batch_divisor": 2}), event("plan_changed", **record)]
    history = History.of(changes, [HISTORY()])
    assert history.part(HISTORY).plan == planned(micro_batch_divisor=2)
    assert history.unreadable == 1


def test_a_plan_that_the_user_gives_is_where_the_changes_begin_and_is_kept(start: Start) -> None:
    given = planned(micro_batch_divisor=2)
    first = start(plan=given)
    first.feature.begin_attempt(0)
    first.feature.begin_attempt(0)
    assert first.plan == given
    assert len(first.said) == 1
    first.fail(out_of_memory())
    changed = planned(micro_batch_divisor=4)
    assert first.plan == changed
    for options, expected in (
        ({"plan": given}, changed),  # the same command goes on
        ({}, changed),
        ({"plan": planned(micro_batch_divisor=8)}, planned(micro_batch_divisor=8)),
    ):
        later = start(**options)
        later.feature.begin_attempt(0)
        assert later.plan == expected


@pytest.mark.parametrize(
    "trains", ["with no Trainer", "in a loop", "with an unguarded Trainer", "in train()"]
)
@pytest.mark.parametrize(
    ("plan", "warned"),
    [
        ({}, False),
        ({"micro_batch_divisor": 2}, True),
        ({"expandable_segments": True}, False),
        ({"expandable_segments": True, "gradient_checkpointing": True}, True),
    ],
    ids=str,
)
def test_a_plan_that_has_no_effect_is_said_once(
    start: Start, plan: dict[str, Any], warned: bool, trains: str
) -> None:
    """Expandable segments reach the allocator by the environment, whatever the script does."""
    run = start()
    run.reporter.write(event("plan_changed", plan=plan))
    if "Trainer" in trains:
        run.reporter.write(
            event("trains_without_trainer", rank=0, trainer="PPOTrainer" if "unguarded" in trains else "")
        )
    else:
        call = {"train_call": 1, "target_steps": 9, "output_dir": "out"}
        kind = LOOP if trains == "in a loop" else "GRPOTrainer"
        run.reporter.write(event("train_started", rank=0, step=0, trainer_class=kind, **call))
    run.feature.poll()
    run.feature.poll()
    said = ["has no effect on training of the script's own" in text for text in run.said]
    assert said == [True] * (warned and trains in ("with no Trainer", "in a loop"))
