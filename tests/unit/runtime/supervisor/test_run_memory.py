"""The memory plan of a run: journaled, said, kept by the next launch, and passed to the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.journal import as_events, event, read_records
from support.memory_cases import GRPO, facts

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.files import write_facts
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.supervisor.run_memory import RunMemory, config_for_ranks, signature_with_plan
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, Shortage
from grpo_run.watchdog.verdict import Verdict


def out_of_memory(phase: MemoryPhase = MemoryPhase.backward, cause: Cause = Cause.gpu_oom) -> Verdict:
    return Verdict(
        cause=cause, culprits=(1,), step=3, phase="forward_backward", confidence="proved",
        sentence="It failed.",
        signature="gpu_oom:backward:step3", deterministic=True,
        shortage=Shortage(cause=cause, source=ErrorSource.allocator, phase=phase, text="CUDA out of memory.",
        figures=Figures()),
    )  # fmt: skip


class Supervised:
    """The part of a supervisor that handles memory, with a real journal."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.run = RunDirectory(path=directory)
        directory.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.live = LiveHistory(self.run.journal, "run")
        self.history = self.live.history
        self.reporter = Reporter(self.live, str(directory), self.said.append)
        config = RunConfig(
            run_id="run", run_directory=directory, target="train.py", module=False, arguments=(), command=(),
            **options
        )  # fmt: skip
        self.memory = RunMemory(config, self.run, self.history, self.reporter)

    def fail(self, verdict: Verdict) -> Action | None:
        """Handle a fault as `faults.py` does; return the action, None if it is not that of a fallback
        step.
        """
        plan = self.history.memory.plan
        self.reporter.write(
            event("incident", cause=str(verdict.cause), step=3, train_call=1, memory_plan=plan.text,
            signature=signature_with_plan(verdict, plan),
        ))  # fmt: skip
        found = self.memory.decide(verdict, several_nodes=False, grown_bytes=0)
        if found is None:
            return None
        self.reporter.write(event("action", action=str(found.decision.action), reason=found.decision.reason))
        if found.change is not None:
            self.memory.change(found.change)
        return found.decision.action


def test_a_change_is_journaled_with_everything_and_said_in_the_scripts_terms(tmp_path: Path) -> None:
    run = Supervised(tmp_path / "run")
    write_facts(run.run.path, facts(dropout=True))
    assert run.fail(out_of_memory()) is Action.restart_with_plan_change
    (event,) = [record for record in read_records(run.run.journal) if record["event"] == "plan_changed"]
    assert event["plan"] == {"micro_batch_divisor": 2}
    assert (event["fallback_step"], event["phase"], event["before"]) == ("micro_batch", "backward", {})
    assert event["inexact"] == ["dropout draws other random numbers"]
    assert run.said[0] == (
        "memory plan: per_device_train_batch_size 8 -> 4, gradient_accumulation_steps 1 -> 2"
    )
    assert "dropout" in run.said[-1]


def test_a_refusal_is_said_with_its_reason(tmp_path: Path) -> None:
    run = Supervised(tmp_path / "run")
    write_facts(run.run.path, facts(loss_type="bnpo"))
    run.fail(out_of_memory())
    assert any("micro batch: loss_type='bnpo'" in sentence for sentence in run.said)


def test_a_later_launch_keeps_the_plan_and_goes_on_from_it(tmp_path: Path) -> None:
    first = Supervised(tmp_path / "run")
    write_facts(first.run.path, GRPO)
    first.fail(out_of_memory())
    second = Supervised(tmp_path / "run")
    assert second.history.memory.plan == MemoryPlan(micro_batch_divisor=2)
    second.fail(out_of_memory())
    assert second.history.memory.plan == MemoryPlan(micro_batch_divisor=4)


@pytest.mark.parametrize("why", ["no shortage of a GPU", "no facts", "facts of another call than the loop"])
def test_other_faults_are_left_to_the_other_policy(tmp_path: Path, why: str) -> None:
    run = Supervised(tmp_path / "run")
    if why != "no facts":
        write_facts(run.run.path, GRPO)
    if "loop" in why:
        run.reporter.write(
            event(
                "train_started", rank=0, step=0, train_call=2, target_steps=9, trainer_class="grpo_run.loop",
                output_dir="out",
            )
        )  # fmt: skip
    cause = Cause.host_oom if "GPU" in why else Cause.gpu_oom
    assert run.fail(out_of_memory(cause=cause)) is None


def test_the_same_error_with_another_plan_is_another_failure() -> None:
    verdict, plan = out_of_memory(), MemoryPlan(micro_batch_divisor=2)
    assert signature_with_plan(verdict, plan) != signature_with_plan(verdict, MemoryPlan())
    other = out_of_memory(cause=Cause.exception)
    assert signature_with_plan(other, plan) == other.signature


def test_shorter_completions_reach_the_ranks_as_a_cap(tmp_path: Path) -> None:
    run = Supervised(tmp_path / "run", generation={"max_completion_length": 512, "max_time": 9.0})
    config = run.memory._config
    assert config_for_ranks(config, MemoryPlan()) is config
    changed = config_for_ranks(config, MemoryPlan(max_completion_length=64))
    assert changed.generation == {"max_completion_length": 64, "max_time": 9.0}


@pytest.mark.parametrize(
    "record", [{"plan": {"micro_batch_divisor": "many"}}, {"plan": {"of_next_year": 1}}, {}]
)
def test_a_plan_that_cannot_be_read_leaves_the_last_one(record: dict[str, Any]) -> None:
    history = History.of(
        as_events(
            [
                {"event": "plan_changed", "time": 1.0, "plan": {"micro_batch_divisor": 2}},
                {"event": "plan_changed", "time": 2.0, **record},
            ]
        )
    )
    assert history.memory.plan == MemoryPlan(micro_batch_divisor=2)
    assert history.unreadable == 1


def test_a_plan_that_the_user_gives_is_where_the_changes_begin_and_is_kept(tmp_path: Path) -> None:
    given = MemoryPlan(micro_batch_divisor=2)
    first = Supervised(tmp_path / "run", memory_plan=given)
    write_facts(first.run.path, GRPO)
    first.memory.begin_attempt()
    first.memory.begin_attempt()
    assert first.history.memory.plan == given
    assert len(first.said) == 1
    first.fail(out_of_memory())
    changed = MemoryPlan(micro_batch_divisor=4)
    assert first.history.memory.plan == changed
    for options, expected in (
        ({"memory_plan": given}, changed),  # the same command goes on
        ({}, changed),
        ({"memory_plan": MemoryPlan(micro_batch_divisor=8)}, MemoryPlan(micro_batch_divisor=8)),
    ):
        later = Supervised(tmp_path / "run", **options)
        later.memory.begin_attempt()
        assert later.history.memory.plan == expected
