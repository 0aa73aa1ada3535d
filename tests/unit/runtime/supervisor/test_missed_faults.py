"""Injected faults that never happened."""

from __future__ import annotations

from grpo_run.runtime.launch.injections import parse_injection
from grpo_run.runtime.supervisor.outcome import never_happened, sentence

KILL = parse_injection("kill@rank1:step9")
EVAL = parse_injection("exception@rank0:step2:phase=eval")


def test_a_fault_that_happened_is_not_missed() -> None:
    """Its canonical text is in the journal."""
    assert never_happened((KILL, EVAL), [str(KILL)], ranks={0, 1}) == (EVAL,)


def test_a_fault_of_another_node_is_left_to_that_node() -> None:
    """Its journal is there. Before any rank was started, nothing is left out."""
    assert never_happened((KILL, EVAL), [], ranks={0}) == (EVAL,)
    assert never_happened((KILL, EVAL), [], ranks=()) == (KILL, EVAL)


def test_the_reason_is_the_step_or_the_phase() -> None:
    """What to change in the option."""
    assert (
        sentence((KILL, EVAL), 6, counted=True)
        == "2 injected faults never happened: kill@rank1:step9 (the run ended at step 6),"
        " exception@rank0:step2:phase=eval (step 2 was not run with phase eval)."
    )
    rows = parse_injection("oom@rank0:step2:rows=4")
    assert "(no phase forward from step 2 on had more than 4 rows)" in sentence((rows,), 6, counted=True)
    tokens = parse_injection("oom@rank0:step2:tokens=40")
    assert "(no phase forward from step 2 on had more than 40 tokens)" in sentence((tokens,), 6, counted=True)
    assert sentence((), 6, counted=True) == ""
    assert (
        sentence((KILL,), 0, counted=False)
        == "1 injected fault never happened: kill@rank1:step9 (without a Trainer or a loop, steps are not"
        " counted)."
    )
