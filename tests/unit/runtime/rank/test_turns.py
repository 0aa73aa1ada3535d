"""What a loop of `consensus.while_any` shows on the board: who generates, and who waits for the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank import consensus as rank_consensus
from grpo_run.trainers import consensus
from grpo_run.watchdog.observation import Phase


@pytest.fixture
def phases(slot: SlotWriter, monkeypatch: pytest.MonkeyPatch) -> SlotWriter:
    """The slot of a rank of several, which has something to do when the others do not."""
    monkeypatch.setattr(rank_consensus, "current", lambda: SimpleNamespace(slot=slot))
    monkeypatch.setattr(consensus, "exchange", lambda call: None)
    return slot


def shown(slot: SlotWriter, more: list[bool]) -> list[tuple[Phase, ...]]:
    """The phases in each turn of a loop, of whose turns the rank itself needs these."""
    found = []
    turns = rank_consensus.Turns()
    for needed in more:
        turns.show(needed)
        found.append(slot.open_phases)
    turns.end()
    return found


@pytest.mark.parametrize("outer", [Phase.forward_backward, Phase.data])
def test_a_rank_generates_until_it_has_nothing_left_and_then_waits(outer: Phase, phases: SlotWriter) -> None:
    """In the body of a step of a loop. What another rank does may give it something to do again."""
    phases.enter(outer)
    generates, waits = (outer, Phase.generate), (outer, Phase.generate, Phase.vote)
    assert shown(phases, [True, True, False, False, True]) == [generates, generates, waits, waits, generates]
    assert phases.open_phases == (outer,)
    assert shown(phases, [False]) == [waits]
    assert phases.open_phases == (outer,)


def test_a_rollout_func_is_in_generation_already(phases: SlotWriter) -> None:
    """Which the loop does not end."""
    phases.enter(Phase.score)
    phases.enter(Phase.generate)
    inside = (Phase.score, Phase.generate)
    assert shown(phases, [True, False]) == [inside, (*inside, Phase.vote)]
    assert phases.open_phases == inside


@pytest.mark.parametrize("outer", [None, Phase.idle, Phase.reward, Phase.startup, Phase.callback])
def test_a_loop_elsewhere_is_no_generation(outer: Phase | None, phases: SlotWriter) -> None:
    """It may be the training itself."""
    if outer is not None:
        phases.enter(outer)
    before = phases.open_phases
    assert shown(phases, [True, False]) == [before, before]
    assert phases.open_phases == before


@pytest.mark.parametrize("how", ["end", "break", "error"])
def test_a_loop_that_is_over_is_no_longer_shown(how: str, phases: SlotWriter) -> None:
    """However it is left."""
    phases.enter(Phase.forward_backward)
    seen = []
    try:
        for number, _ in enumerate(consensus.while_any(lambda: len(seen) < 3)):
            seen.append(phases.open_phases)
            if number == 1 and how == "break":
                break
            if number == 1 and how == "error":
                raise ValueError("of the script")
    except ValueError:
        pass
    assert set(seen) == {(Phase.forward_backward, Phase.generate)}
    assert len(seen) == (3 if how == "end" else 2)
    assert phases.open_phases == (Phase.forward_backward,)


def test_passes_of_a_loop_count_as_tokens_of_the_rank_that_generates(phases: SlotWriter) -> None:
    """Those in which it only helps others are none of its own."""
    phases.enter(Phase.forward_backward)
    turns = rank_consensus.Turns()
    for more in (True, True, False, False):
        turns.show(more)
        phases.record_pass()
    turns.end()
    phases.record_pass()
    assert phases._generation_passes == 2
