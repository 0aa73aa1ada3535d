"""What a script trains by itself is neither counted nor saved, and that is said."""

from __future__ import annotations

from collections.abc import Callable

from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.processes.agent import Directive
from grpo_run.watchdog.observation import RankState


def test_a_script_that_trains_by_itself_is_stopped_by_sigterm(start: Callable[..., SupervisedRun]) -> None:
    """What a restart means is said once. The code is the script's, or 93."""
    run = start()
    for rank, slot in run.slots.items():
        slot.state, slot.train_call, slot.no_trainer_after = RankState.starting, 0, 1
        slot.publish()
        Journal(run.directory.journal, "run-1").write(event("trains_without_trainer", rank=rank, trainer=""))
    run.poll()
    run.poll()
    said = [text for text in run.messages if "no Trainer and no loop" in text]
    assert said == [
        (
            "the script takes optimizer steps with no Trainer and no loop: a restart runs the script from the"
            " beginning; nothing is saved"
        )
    ]
    assert run.state is RunState.running
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.monitor
    assert run.ranks.signals == 1
    assert run.poll(run.ranks.exit(0, signal=15)) is Directive.monitor
    assert run.poll(run.ranks.exit(1, signal=15)) is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (93, RunState.stopped)
    assert run.events("incident") == []
    assert RunReader(run.directory).read().history.state == "stopped"


def test_a_train_call_after_steps_of_the_script_is_said(start: Callable[..., SupervisedRun]) -> None:
    """What was said before is true of the steps before it only."""
    run = start()
    journal = Journal(run.directory.journal, "run-1")
    journal.write(event("trains_without_trainer", rank=0, trainer=""))
    run.poll()
    journal.write(
        event("train_started", rank=0, train_call=1, step=0, trainer_class="GRPOTrainer", output_dir="/out")
    )
    run.poll()
    run.poll()
    said = [text for text in run.messages if "counted and saved" in text]
    assert said == ["train() call 1 (GRPOTrainer in /out) begins: its steps are counted and saved"]
