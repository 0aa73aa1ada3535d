"""What ranks are told of injected faults, and what is said at the end of those that never happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.journal import Journal

KILL, EVAL = "kill@rank1:step9", "exception@rank0:step2:phase=eval"


def trained(path: Path, *texts: str, fired: str = "", strict: bool = False) -> SupervisedRun:
    """A run of two ranks with these injections that has committed step 6."""
    run = SupervisedRun(path / "run", features={"injections": {"inject": texts, "strict": strict}})
    run.attempt()
    run.train()
    run.vote(6)
    run.poll()
    if fired:
        Journal(run.directory.journal, "run-1").write(event("fault_injected", rank=1, injection=fired))
    return run


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 93)])
def test_a_run_whose_injected_fault_never_happened_says_so(tmp_path: Path, strict: bool, code: int) -> None:
    """It is in the last sentence and counts as a warning; under --strict-faults the run has failed."""
    run = trained(tmp_path, KILL, strict=strict)
    run.finish(0)
    assert run.supervisor.exit_code == run.supervisor.status().history.exit_code == code
    assert run.supervisor.status().state == ("failed" if strict else "finished")
    missed = "1 injected fault never happened: kill@rank1:step9 (the run ended at step 6)."
    assert run.supervisor.sentence.endswith(missed)
    if strict:
        assert "at step 6, but --strict-faults asks for all injected faults." in run.supervisor.sentence
    assert [record["text"] for record in run.events("warning")] == [missed]
    assert run.events("run_ended")[0]["sentence"] == run.supervisor.sentence
    # a strict run is run again by the same command
    assert run.supervisor.status().history.completed is not strict


def test_a_fault_that_happened_lets_a_strict_run_finish_and_does_not_happen_again(tmp_path: Path) -> None:
    """Each one is injected once per run; its canonical text identifies it."""
    run = trained(tmp_path, KILL, fired=KILL, strict=True)
    run.finish(0)
    assert run.supervisor.rank_settings(1)["injections"] == {"fired": (KILL,)}
    assert (run.supervisor.exit_code, run.events("warning")) == (0, [])


def test_a_stopped_run_may_still_reach_its_injected_fault(tmp_path: Path) -> None:
    """The same command continues it."""
    run = trained(tmp_path, KILL, strict=True)
    run.supervisor.request_stop("SIGTERM")
    run.finish(75)
    assert (run.supervisor.exit_code, run.events("warning")) == (75, [])


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ((KILL, EVAL), "step 6), exception@rank0:step2:phase=eval (step 2 was not run with phase eval)."),
        (("oom@rank0:step2:rows=4",), "(no phase forward from step 2 on had more than 4 rows)"),
        (("oom@rank0:step2:tokens=40",), "(no phase forward from step 2 on had more than 40 tokens)"),
        (("kill@rank3:step9",), ""),
    ],
)
def test_the_reason_is_the_step_or_the_phase(tmp_path: Path, texts: tuple[str, ...], says: str) -> None:
    """What to change in the option. A fault of another node is left to that node, which has its journal."""
    run = trained(tmp_path, *texts)
    run.finish(0)
    assert says in run.supervisor.sentence
    assert ("never happened" in run.supervisor.sentence) is bool(says)


def test_steps_of_a_script_that_trains_by_itself_are_not_counted(tmp_path: Path) -> None:
    """No injected fault can happen in it."""
    run = SupervisedRun(tmp_path / "run", features={"injections": {"inject": [KILL]}})
    run.attempt()
    Journal(run.directory.journal, "run-1").write(event("trains_without_trainer", rank=0))
    run.finish(0)
    assert run.supervisor.sentence.endswith(
        "1 injected fault never happened: kill@rank1:step9 (without a Trainer or a loop, steps are not"
        " counted)."
    )
