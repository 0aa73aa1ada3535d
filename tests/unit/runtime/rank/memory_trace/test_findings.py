"""The rule: what has grown at every look, and will not fit; and the sentences of what is found."""

from __future__ import annotations

import pytest

from grpo_run.runtime.rank.memory_trace._census import Site
from grpo_run.runtime.rank.memory_trace._finding import Gain, HolderSizes, TraceFinding, sentence


def held(*births: int) -> list[tuple[int, int]]:
    """Storages of 10 bytes of these steps."""
    return [(born, 10) for born in births]


def test_a_holder_has_grown_since_it_was_looked_at_first() -> None:
    """Two looks at least; the figures are since growth began."""
    sizes = HolderSizes()
    assert sizes.look(5, held(*range(5))) is None
    assert sizes.look(10, held(*range(11))) == Gain(110, 60, 5)
    assert sizes.look(15, held(*range(16))) == Gain(160, 110, 10)


@pytest.mark.parametrize("later", [range(6, 11), range(3, 11), range(5)])
def test_a_holder_that_replaces_what_it_holds_has_not_grown(later: range) -> None:
    """All of it, or most; nor has one to which nothing was added. Growth is measured anew from there."""
    sizes = HolderSizes()
    sizes.look(5, held(*range(5)))
    assert sizes.look(10, held(*later)) is None
    assert sizes.look(15, held(*later, 11, 12)) == Gain(10 * len(later) + 20, 20, 5)


@pytest.mark.parametrize(
    ("gained", "steps_left", "free_bytes", "outgrows"),
    [(20, 99, 99, True), (20, 40, 99, False), (10, 999, 99, False), (20, 0, 99, False), (20, 99, 0, False)],
    ids=["will not fit", "will fit", "little so far", "steps unknown", "memory unknown"],
)  # fmt: skip
def test_what_does_not_fit_until_the_end_is_an_alarm(
    gained: int, steps_left: int, free_bytes: int, outgrows: bool
) -> None:
    """Once it takes a tenth of what was free, and only if the end and the memory are known."""
    gain = Gain(gained, gained, 10)
    assert bool(gain.outgrows(steps_left=steps_left, free_bytes=free_bytes)) is outgrows


HELD = "held by list `history` of Collector (trl/collector.py:40): "
SENTENCES = {
    "growth": (
        f"made at policy.py:133, {HELD}it has kept tensors of 5 steps, 1.0 MiB a step, which does not fit"
        " into 2.0 MiB for the 9 steps that are left; bound it, or keep less"
    ),
    "graph": (
        f"made at policy.py:133, saved by an autograd graph that is {HELD}nothing has run backward through it"
        " in 5 steps; compute it under torch.no_grad(), or detach it"
    ),
    "growing": f"made at policy.py:133, {HELD}it has kept tensors of 5 steps; cannot tell whether that ends",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_finding_is_one_line_that_names_line_and_holder(kind: str) -> None:
    """Paths are relative to the working directory, or to the folder of the installed packages."""
    found = TraceFinding(
        kind=kind, tensors=64, bytes=64 * 8 * 174 * 50257 * 4, shape=(8, 174, 50257), dtype="float32",
        since_step=3, steps=5, made_at=Site("/home/policy.py", 133), holder="list `history` of Collector",
        held_at=Site("/lib/site-packages/trl/collector.py", 40),
        details={"bytes_a_step": 2**20, "steps_left": 9, "free_bytes": 2**21},
    )  # fmt: skip
    what = "64 tensors [8, 174, 50257] float32 (16.7 GiB) alive since step 3, "
    still = "still growing: " if kind == "growing" else ""
    assert sentence(found, "/home") == still + what + SENTENCES[kind]
