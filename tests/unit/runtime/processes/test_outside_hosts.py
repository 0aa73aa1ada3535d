"""Which hosts stay out of a run, and when they take part all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from grpo_run.runtime.processes._outside_hosts import (
    ROW_SECONDS,
    losses_in_a_row,
    needed_text,
    outside,
    why_apart,
)
from grpo_run.runtime.upstream.rendezvous_names import View


@dataclass(frozen=True)
class Node:
    """A host, as torch describes it."""

    addr: str


ONE, TWO, THREE = Node("node0"), Node("node1"), Node("node2")
MET = View(
    participants={ONE: 0, THREE: 1},
    waiting=frozenset(), spares=frozenset(), complete=True, is_spare=False, beats={}, lost={},
    in_a_row={"node1": 2}, refused={}, apart={}, closes_soon=False, ended=None, read_at=0.0,
)  # fmt: skip
MEETING = replace(MET, complete=False)


def test_losses_are_in_a_row_unless_the_host_lasted() -> None:
    """One that took part for an hour in between has not failed twice for one reason."""
    assert losses_in_a_row(0, 5.0) == 1
    assert losses_in_a_row(1, ROW_SECONDS - 1) == 2
    assert losses_in_a_row(5, ROW_SECONDS) == 1


@pytest.mark.parametrize(
    ("seen", "needed", "apart"),
    [
        (MET, 2, True),
        (replace(MET, in_a_row={"node1": 1, "node2": 2}), 2, False),
        (replace(MET, participants={ONE: 0}), 2, False),  # no other host is there
        (
            replace(MET, participants={ONE: 0}, waiting=frozenset({THREE})),
            2,
            True,
        ),  # it starts its ranks again
        (replace(MET, participants={ONE: 0}, spares=frozenset({THREE})), 2, True),
        (replace(MET, participants={ONE: 0}, waiting=frozenset({TWO})), 2, False),  # it does not count itself
        (replace(MET, participants={ONE: 0}), 1, True),
        (replace(MEETING, closes_soon=True), 2, True),  # `--nnodes 2:3`, whose hosts wait a moment for more
        (MEETING, 2, False),  # the others wait for all, because they cannot keep the batch
    ],
)
def test_a_host_lost_twice_stays_out_only_while_the_others_suffice(
    seen: View, needed: int, apart: bool
) -> None:
    """Whatever the round is at; and its user is told how to let it back."""
    why = why_apart(seen, TWO, needed)
    assert bool(why) == apart
    assert not apart or ("lost 2 times in a row" in why and "--rdzv-conf readmit=1" in why)


def test_hosts_outside_are_named() -> None:
    """While they are waited for, those that are needed are named too, unless they are there."""
    seen = replace(MET, participants={ONE: 0}, refused={"node3": "was refused: no such script"})
    assert outside(seen) == {"node3": "was refused: no such script"}
    lost = "; host node1 was lost 2 times in a row and is needed, because no other one is there"
    assert needed_text(seen) == f"{lost}; host node3 was refused: no such script"
    assert needed_text(replace(seen, waiting=frozenset({TWO}), refused={})) == ""
    assert outside(replace(seen, apart={TWO: "stays out"}))["node1"] == "stays out"
