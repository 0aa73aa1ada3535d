"""An injected fault that never happened is said, and fails a strict run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.launch.injections import parse_injection


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 93)])
def test_a_run_whose_injected_fault_never_happened_says_so(
    start: Callable[..., SupervisedRun], strict: bool, code: int
) -> None:
    """It is in the last sentence and counts as a warning; under --strict-faults the run has failed."""
    run = start(step=6, injections=(parse_injection("kill@rank1:step9"),), strict_faults=strict)
    run.finish(0)
    assert run.supervisor.exit_code == run.supervisor.status().history.exit_code == code
    assert run.supervisor.status().state == ("failed" if strict else "finished")
    missed = "1 injected fault never happened: kill@rank1:step9 (the run ended at step 6)."
    assert run.supervisor.sentence.endswith(missed)
    assert [record["text"] for record in run.events("warning")] == [missed]
    assert run.events("run_ended")[0]["sentence"] == run.supervisor.sentence
    # a strict run is run again by the same command
    assert run.supervisor.status().history.completed is not strict


def test_a_fault_that_happened_lets_a_strict_run_finish(start: Callable[..., SupervisedRun]) -> None:
    """The event of the rank may come with its exit."""
    fault = parse_injection("slow@rank1:step2")
    run = start(step=6, injections=(fault,), strict_faults=True)
    Journal(run.directory.journal, "run-1").write(event("fault_injected", rank=1, injection=str(fault)))
    run.finish(0)
    assert (run.supervisor.exit_code, run.events("warning")) == (0, [])


def test_a_stopped_run_may_still_reach_its_injected_fault(start: Callable[..., SupervisedRun]) -> None:
    """The same command continues it."""
    run = start(step=6, injections=(parse_injection("kill@rank1:step9"),), strict_faults=True)
    run.supervisor.request_stop("SIGTERM")
    run.finish(75)
    assert (run.supervisor.exit_code, run.events("warning")) == (75, [])
