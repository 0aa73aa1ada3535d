"""The lifecycle table."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from grpo_run.runtime.errors import IllegalTransition
from grpo_run.runtime.history.lifecycle import (
    LIVE,
    TERMINAL,
    TRANSITIONS,
    Lifecycle,
    RunEvent,
    RunState,
    diagram,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "lifecycle.md"
PATHS: dict[RunState, list[RunEvent]] = {RunState.starting: []}
"""The shortest way to every state that can be reached."""
_waiting = [RunState.starting]
while _waiting:
    _here = _waiting.pop(0)
    for (_old, _event), _new in TRANSITIONS.items():
        if _old is _here and _new not in PATHS:
            PATHS[_new] = [*PATHS[_here], _event]
            _waiting.append(_new)


def at(state: RunState) -> tuple[Lifecycle, list[tuple[RunState, RunEvent, RunState]]]:
    """Return a lifecycle in `state`, and the changes that its listener receives from now on."""
    heard: list[tuple[RunState, RunEvent, RunState]] = []
    lifecycle = Lifecycle(lambda old, event, new: heard.append((old, event, new)))
    for event in PATHS[state]:
        lifecycle.fire(event)
    heard.clear()
    return lifecycle, heard


def test_the_states_are_the_documented_ones() -> None:
    """They appear in status, metrics and journal."""
    expected = "starting running suspect collecting recovering stopping finished stopped failed"
    assert [str(state) for state in RunState] == expected.split()


def test_every_state_can_be_reached() -> None:
    """A state that cannot be reached is dead code."""
    assert set(PATHS) == set(RunState)


def test_every_event_is_used() -> None:
    """An event that no state accepts is a mistake in the table."""
    assert {event for _, event in TRANSITIONS} == set(RunEvent)


@pytest.mark.parametrize(
    ("state", "event"), sorted(set(itertools.product(RunState, RunEvent)) - set(TRANSITIONS), key=str)
)
def test_an_illegal_transition_changes_nothing(state: RunState, event: RunEvent) -> None:
    """It raises, the state stays, and the listener is not called."""
    lifecycle, heard = at(state)
    with pytest.raises(IllegalTransition, match=f"{event.value}.*{state.value}"):
        lifecycle.fire(event)
    assert lifecycle.state is state
    assert heard == []


@pytest.mark.parametrize(("state", "event"), sorted(TRANSITIONS, key=str))
def test_the_listener_is_called_once_per_change(state: RunState, event: RunEvent) -> None:
    """It is not called if the state stays."""
    lifecycle, heard = at(state)
    new = TRANSITIONS[state, event]
    assert lifecycle.fire(event) is lifecycle.state is new
    assert heard == ([] if new is state else [(state, event, new)])


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_terminal_states_accept_no_event(state: RunState) -> None:
    """A run that has ended stays ended."""
    assert [event for old, event in TRANSITIONS if old is state] == []


def test_after_a_fault_only_written_evidence_leads_to_recovery() -> None:
    """Nothing is killed before evidence is written.

    A membership change is no fault, because its ranks are healthy.
    """
    leading = {(old, event) for (old, event), new in TRANSITIONS.items() if new is RunState.recovering}
    healthy = {(old, event) for old, event in leading if event is RunEvent.membership_changed}
    assert leading - healthy == {(RunState.collecting, RunEvent.evidence_written)}
    assert RunState.collecting not in {old for old, _ in healthy}
    assert {new for (_, event), new in TRANSITIONS.items() if event is RunEvent.fault} == {
        RunState.collecting
    }


def test_a_run_can_be_given_up_in_every_live_state() -> None:
    """The agent may fail at any time: the table cannot trap a run."""
    assert {old for old, event in TRANSITIONS if event is RunEvent.gave_up} == LIVE


def test_the_documentation_contains_this_table() -> None:
    """The diagram in docs/reference/lifecycle.md is the generated one."""
    blocks = re.findall(r"```mermaid\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks == [diagram()]
