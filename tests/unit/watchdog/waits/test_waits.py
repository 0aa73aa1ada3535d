"""What the threads of a rank wait for, and the proof that nothing can wake it; see `waits.txt`."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.wait_shell import RANK, WaitShell, thread_of
from support.transcripts import Story, stories

from grpo_run.watchdog.waits.looks import RankLook
from grpo_run.watchdog.waits.proof import prove_stuck


@stories(__file__, "waits.txt")
def test_waits(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(WaitShell(), word)


@st.composite
def ranks(draw: st.DrawFn) -> WaitShell:
    """A rank with up to three processes, whose threads wait for one another in any way."""
    shell = WaitShell()
    for index, pid in enumerate((RANK, 200, 300)[: draw(st.integers(1, 3))]):
        closed = st.sampled_from(["futex", "child", "stopped", "child:200"])
        parent = draw(st.sampled_from([RANK, 200][: max(1, index)]))
        shell.process(
            str(pid), *draw(st.lists(closed, min_size=1, max_size=3)), parent=str(parent),
            handles=draw(st.sampled_from(["", "CHLD"])),
        )  # fmt: skip
    return shell


def with_thread(look: RankLook, pid: int, word: str) -> RankLook:
    """The look with one more thread of a process."""
    one = look.processes[pid]
    threads = (*(one.threads or ()), thread_of(pid + 99, word))
    return replace(look, processes={**look.processes, pid: replace(one, threads=threads)})


@given(shell=ranks(), unknown=st.sampled_from(["unknown", "timed", "pipe", "accept"]))
def test_what_is_unknown_or_has_moved_never_yields_a_proof(shell: WaitShell, unknown: str) -> None:
    """A thread of the rank, of a child that its main thread waits for, or a thread that ran between the
    looks, whatever all others wait for.
    """
    look = with_thread(shell.look, RANK, unknown)
    assert prove_stuck(look, look) is None
    first = shell.look
    shell.runs(str(RANK), str(RANK))
    assert prove_stuck(first, shell.look) is None
    own = first.processes[RANK]
    threads = (thread_of(RANK, "child:200"), *(own.threads or ())[1:])
    shell.look = replace(first, processes={**first.processes, RANK: replace(own, threads=threads)})
    for child in (["unreadable"], [unknown], ["futex", unknown]):
        shell.process("200", *child)
        assert prove_stuck(shell.look, shell.look) is None
