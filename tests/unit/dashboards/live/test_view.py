"""What is shown of a run: its verdict first, and no text that breaks a page or a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.incidents import HOSTILE

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.live.view import view
from grpo_run.runtime.history.host_status import HostStatus
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Phase

MakeStatus = Callable[..., RunStatus]
ANSI = "\x1b[2J\x1b]0;taken\x07"


def shown(status: RunStatus) -> dict[str, Any]:
    """What is shown, as a page gets it."""
    value: dict[str, Any] = json.loads(json.dumps(view(status, (), 200.0)))
    return value


def fault(**changes: Any) -> Recovery:
    """A fault that the run has not recovered from yet."""
    fields = {"cause": "signal", "rank": 1, "step": 7, "action": "restart", "sentence": "Rank 1 was killed."}
    return Recovery(**fields | changes)


def test_a_fault_is_the_verdict_until_it_is_recovered(make_status: MakeStatus) -> None:
    """Its sentence comes first and in the color of a fault; afterwards the summary does."""
    status = make_status(state="collecting", sentence="Collecting at step 7, no faults.")
    assert shown(status)["sentence"] == "A fault was found, and its evidence is being written."
    status = make_status(state="recovering", sentence="Recovering at step 7.")
    status.history.recoveries.append(fault())
    assert shown(status)["sentence"] == "Rank 1 was killed."
    assert (shown(status)["also"], shown(status)["tone"]) == ("Recovering at step 7.", "bad")
    status.history.recoveries[-1].recovery_seconds = 1.0
    status = replace(status, state="running", sentence="Running.", awaited=None)
    assert [shown(status)[name] for name in ("sentence", "also", "tone")] == ["Running.", "", "good"]


@pytest.mark.parametrize(
    ("state", "exit_code", "tone"),
    [("finished", 0, "good"), ("stopped", 75, "quiet"), ("failed", 93, "bad"), ("unknown", None, "bad")],
)
def test_the_end_of_a_run_decides_its_color(
    make_status: MakeStatus, state: str, exit_code: int | None, tone: str
) -> None:
    """Also that of one whose supervisor was killed."""
    status = make_status(state=state, supervisor_pid=None)
    status.history.exit_code = exit_code
    found = shown(status)
    assert (found["tone"], found["live"], found["remaining_seconds"]) == (tone, False, None)


def test_a_fault_at_which_a_run_gave_up_is_said_once(make_status: MakeStatus) -> None:
    """The sentence of the end begins with it."""
    status = make_status(state="failed", sentence="Rank 1 was killed. Gave up.", supervisor_pid=None)
    status.history.exit_code = 93
    status.history.recoveries.append(fault(gave_up=True))
    assert (shown(status)["sentence"], shown(status)["also"]) == ("Rank 1 was killed. Gave up.", "")


def test_lateness_waits_and_memory_of_ranks_are_shown(
    make_status: MakeStatus, make_slot: Callable[..., Any]
) -> None:
    """Rank 0 is waited for; rank 1 has voted later; rank 2 cannot be observed."""
    slots = (
        make_slot(rank=0, voted_step=7, voted_at_ns=990 * 10**9),
        make_slot(rank=1, local_rank=1, voted_step=7, voted_at_ns=990_250_000_000),
        None,
    )
    awaited = replace(make_status().awaited, since_seconds=900.0)  # type: ignore[type-var]
    ranks = shown(make_status(*slots, awaited=awaited))["ranks"]
    assert [one.get("late_seconds") for one in ranks] == [0.0, 0.25, None]
    assert [(one.get("awaited"), one.get("waits")) for one in ranks] == [
        (True, False), (False, True), (None, None)
    ]  # fmt: skip
    memory, gib = ranks[0]["memory"], 2**30
    assert [memory[name] / gib for name in ("now_bytes", "peak_bytes", "capacity_bytes")] == [20, 70, 80]
    assert ranks[2]["phase"] == "cannot be observed"
    assert memory["by_phase"][Phase.generate.name] == 60 * gib


def test_the_hosts_of_a_run_over_several_are_shown(make_status: MakeStatus) -> None:
    """In their order, without what would break a page; a run on one host has none."""
    assert shown(make_status())["hosts"] == []
    hosts = HostStatus(name="node0", state="running"), HostStatus(name=f"{ANSI}node1", silent_seconds=60.0)
    lines = shown(replace(make_status(), hosts=hosts))["hosts"]
    assert lines[0] == "host node0: running, this host"
    assert lines[1].endswith("node1: nothing told yet, not heard for 60 s")
    assert "\x1b" not in lines[1]


def test_texts_of_scripts_are_harmless(make_status: MakeStatus) -> None:
    """Script tags stay text for the page to escape; control characters, halves of pairs and length go."""
    long = ANSI + "\0" + HOSTILE + "x" * 10_000_000
    status = make_status(state="failed", sentence=long, run_id=ANSI)
    status.history.recoveries.append(fault(sentence=long, cause=ANSI, incident=f"/runs/a/{ANSI}"))
    text = json.dumps(shown(status), ensure_ascii=False)
    assert len(text) < 20_000
    assert not any(char < " " or "\x7f" <= char < "\xa0" for char in text)
    assert "\\ud800" in text
    assert "…" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\tb\nc", "a\tb\nc"), ("\x1b[31m", "␛[31m"), ("\0", "␀"), ("\x9b", "\ufffd"),
     ("\u202eabc", "\ufffdabc"),
     ("\ud800", "\\ud800"), ("é漢🙂", "é漢🙂"), (7, "7")],
)  # fmt: skip
def test_control_characters_become_visible(text: object, expected: str) -> None:
    """Other characters stay."""
    assert clean(text) == expected


def test_advice_is_silent_while_something_is_wrong(make_status: MakeStatus) -> None:
    """A larger batch is no answer to a dead rank; after the recovery it is said again."""
    status = make_status(awaited=None)
    status.history.advice["batch"] = f"A larger batch would fit.{ANSI}"
    advice = shown(status)["advice"]
    assert advice[0].startswith("A larger batch would fit.")
    assert "\x1b" not in advice[0]
    assert shown(replace(status, state="suspect"))["advice"] == []
    status.history.recoveries.append(fault())
    assert shown(status)["advice"] == []
    status.history.recoveries[-1].recovery_seconds = 1.0
    assert shown(status)["advice"] == advice
