"""Verdicts on failed and hanging ranks; see the text files beside this one."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.diagnosis_shell import DiagnosisShell
from support.transcripts import Story, stories


@stories(__file__, "exits.txt", "memory.txt", "hangs.txt")
def test_verdicts(story: Story, word: str) -> None:
    """Every story of these files."""
    story.check(DiagnosisShell(), word)


@given(
    order=st.permutations(range(4)),
    killed=st.integers(0, 3),
    times=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
)
def test_the_culprit_does_not_depend_on_the_order_of_the_list(
    order: list[int], killed: int, times: list[float]
) -> None:
    """The killed rank is the culprit for any order of the exits."""
    shell = DiagnosisShell()
    for rank in order:
        if rank == killed:
            shell.exit(str(rank), signal=signal.SIGKILL.name)
        else:
            shell.exit(str(rank), "peer", wall_time=str(times[rank]))
    shell.diagnose()
    assert shell.verdict.culprits == (killed,)
    assert set(shell.verdict.waiters) == set(range(4)) - {killed}
