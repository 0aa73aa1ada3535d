"""A rehearsal says what was seen, and holds only if everything that a run relies on held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.rehearsal._seen import Seen, first_difference, weights_of
from grpo_run.runtime.rehearsal.drills import DRILLS, chosen, seconds_of
from grpo_run.runtime.rehearsal.judgement import (
    exit_code,
    judge,
    judge_job,
    judge_room,
    judge_untouched,
    not_run,
)

NAMED = {drill.name: drill for drill in DRILLS}
WEIGHTS = {"rank0, call 1": "aa"}


def traces(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """One rank that sees data, rewards and weights; `changes` are of the line that is named by `at`."""
    lines = [
        {"call": 1, "step": 0, "what": "weights", "given": "w0", "got": None},
        {"call": 1, "step": 1, "what": "prompts", "given": "p", "got": None},
        {"call": 1, "step": 1, "what": "reward judge", "given": "c", "got": [1.0, 2.0]},
        {"call": 1, "step": 8, "what": "weights", "given": "aa", "got": None},
    ]
    if changes:
        lines[changes.pop("at")] |= changes
    return {"rank0": lines}


def seen(**changes: Any) -> Seen:
    return replace(Seen(codes=(0,), seconds=9.0, weights=WEIGHTS, traces=traces()), **changes)


def fault(**changes: Any) -> Recovery:
    made = Recovery(cause="signal", rank=1, step=5, action="restart", from_checkpoint=4, sentence="It died.")
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"at": 0, "given": "w1"}, "seed the model's initialization"),
        ({"at": 1, "given": "q"}, "the data differs at step 1"),
        ({"at": 2, "given": "d"}, "the completions of step 1 differ"),
        ({"at": 2, "got": [1.0, 3.0]}, "`judge` differs between two calls with the same arguments (2.0"),
        ({"at": 3, "given": "bb"}, "the weights after step 8 differ"),
    ],
)  # fmt: skip
def test_the_first_difference_of_two_undisturbed_runs_is_named(changes: dict[str, Any], named: str) -> None:
    assert named in (first_difference(traces(), traces(**changes)) or "")


def test_equal_runs_have_no_difference_and_a_shorter_one_has() -> None:
    assert first_difference(traces(), traces()) is None
    assert first_difference(traces(), {"rank0": traces()["rank0"][:2]}) is not None


def test_the_last_weights_of_each_rank_count() -> None:
    lines = traces()["rank0"]
    assert weights_of({"rank0": [*lines, {**lines[-1], "given": "bb"}]}) == {"rank0, call 1": "bb"}


@pytest.mark.parametrize(
    ("drill", "changes", "held", "said"),
    [
        ("kill", {"faults": (fault(),)}, True, "equal"),
        ("kill", {"faults": (fault(cause="exception"),)}, False, "not seen for what it is"),
        ("kill", {"faults": (fault(from_checkpoint=None, lost_steps=4),)}, False, "from the first step"),
        ("kill", {"faults": (fault(),), "weights": {"rank0, call 1": "bb"}}, False, "differ (rank0, call 1)"),
        ("kill", {"faults": (fault(),), "left": ("sleep 99",)}, False, "sleep 99"),
        ("kill", {"faults": (fault(), fault(sentence="No.")), "codes": (93,)}, False, "started again: No."),
        ("kill", {"codes": (None,)}, False, "no end in time"),
        ("oom", {"faults": (fault(cause="gpu_oom"),), "weights": {}, "changed": "plan"}, True, "ed: plan"),
        ("oom", {"faults": (fault(cause="gpu_oom"),), "weights": {}}, False, "differ"),
        ("server", {"faults": (fault(cause="rollout_server_dead"),)}, True, "It died; then finished"),
        ("server", {}, False, "not seen for what it is"),
        ("tool", {"ended_calls": ("tool add was ended after 5 s",)}, True, "after 5 s; then finished"),
        ("tool", {"ended_calls": ("tool add",), "weights": {}, "changed": "left"}, True, "compared: left"),
        ("tool", {"faults": (fault(cause="no_progress"),)}, False, "not ended by itself"),
        ("tool", {}, False, "not ended by itself"),
        ("term", {"codes": (75, 0), "stopped_at": 6, "resumed_at": 6}, True, "nothing"),
        ("term", {"codes": (0, 0)}, False, "did not end as it should"),
        ("supervisor", {"codes": (-9, 0), "stopped_at": 2, "resumed_at": 4}, True, "nothing"),
        ("checkpoint", {"codes": (75, 0), "stopped_at": 6, "resumed_at": 4}, True, "2 steps"),
        ("checkpoint", {"codes": (75, 0), "stopped_at": 6, "resumed_at": 4}, True, "at step 6, went on from"),
        ("checkpoint", {"codes": (75, 0), "stopped_at": 6}, False, "all steps"),
    ],
)  # fmt: skip
def test_a_drill_holds_only_if_the_job_survives_it(
    drill: str, changes: dict[str, Any], held: bool, said: str
) -> None:
    row = judge(NAMED[drill], seen(**changes), seen(), None)
    assert row.held is held, row
    assert said in f"{row.seen} {row.weights} {row.lost} {row.advice}", row


def test_weights_that_cannot_be_equal_are_no_shortfall_of_a_drill() -> None:
    row = judge(NAMED["kill"], seen(faults=(fault(),), weights={}), seen(), "reward `judge` differs")
    assert row.held
    assert "reward `judge` differs" in row.weights


def test_the_job_itself_is_judged_first() -> None:
    row, why = judge_job(seen(), seen(), 8)
    assert row.held
    assert why is None
    row, why = judge_job(seen(), seen(traces=traces(at=1, given="q")), 8)
    assert row.held is False
    assert why is not None
    assert "data" in why
    assert judge_job(seen(codes=(93,)), None, 8)[0].held is False
    assert judge_job(seen(weights={}), seen(weights={}), 8)[0].held is False
    assert judge_job(seen(), None, 8)[0].held is None


def test_room_is_needed_for_what_is_kept_and_one_more() -> None:
    saving = {"limit": None, "max_steps": 100, "save_steps": 10.0}
    assert not judge_room("out", free_bytes=10_999, checkpoint_bytes=1000, saving=saving).held
    assert judge_room("out", free_bytes=11_000, checkpoint_bytes=1000, saving=saving).held
    assert judge_room("out", free_bytes=3000, checkpoint_bytes=1000, saving={**saving, "limit": 2}).held


def test_only_a_table_in_which_everything_held_ends_with_0() -> None:
    held = judge_untouched([])
    assert exit_code([held]) == 0
    assert exit_code([held, judge_untouched(["real/notes.txt"])]) == 1
    assert exit_code([held, not_run(NAMED["kill"], "the time was too short")]) == 1
    assert exit_code([held, not_run(NAMED["tool"], "the script has no tools", applies=False)]) == 0


def test_drills_and_durations_are_checked() -> None:
    assert [drill.name for drill in chosen("term,kill")] == ["kill", "term"]
    assert seconds_of("5m") == 300
    assert seconds_of("90") == seconds_of("90s") == 90
    for text in ("", "m", "-5m", "nan"):
        with pytest.raises(ConfigError, match="--for"):
            seconds_of(text)
    for names in ("", "kil"):
        with pytest.raises(ConfigError, match="drills: kill"):
            chosen(names)
