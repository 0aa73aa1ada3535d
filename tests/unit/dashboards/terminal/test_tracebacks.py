"""Tracebacks of ranks that failed are held back until the culprit's has been shown."""

from __future__ import annotations

from grpo_run.dashboards.terminal._tracebacks import MAX_HELD_LINES, HeldTracebacks

START = "Traceback (most recent call last):"
OWN = [START, '  File "train.py", line 31, in reward', "    raise ValueError(text)", "ValueError: bad"]
LOST = [
    START,
    '  File "train.py", line 90, in <module>',
    "    trainer.train()",
    '  File "torch/distributed/distributed_c10d.py", line 3034, in all_reduce',
    "    work.wait()",
    "RuntimeError: [third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4182",
]


def held_by(failed: set[int], *output: tuple[int, list[str]]) -> tuple[HeldTracebacks, list[str]]:
    """Output of ranks, of which some have failed, and what was printed of it immediately."""
    tracebacks = HeldTracebacks(failed.__contains__)
    return tracebacks, [
        text for rank, lines in output for line in lines for text in tracebacks.hold(rank, line)
    ]


def test_a_connection_error_is_folded_once_the_fault_is_shown() -> None:
    """Its rank's file has it."""
    tracebacks, printed = held_by({0}, (0, ["training", *LOST, "[rank0] exit handler"]))
    assert printed == ["training"]
    assert tracebacks.release(explained=True) == []


def test_a_connection_error_without_an_explanation_is_printed() -> None:
    """The run was stopped meanwhile, for example."""
    tracebacks, _ = held_by({0}, (0, LOST))
    assert tracebacks.release(explained=False) == [(0, line) for line in LOST]


def test_the_culprits_traceback_is_printed_once() -> None:
    """It was shown first, from the rank's error file; the file may hold its end only."""
    for shown in ("\n".join(OWN), "…" + "\n".join(OWN)[20:] + "\n"):
        tracebacks, printed = held_by({1}, (1, OWN))
        tracebacks.note_shown(shown)
        assert (printed, tracebacks.release(explained=True)) == ([], [])


def test_a_second_error_of_its_own_follows_the_culprits() -> None:
    """It does not report a lost connection, so it may matter."""
    other = [*OWN[:-1], "KeyError: 'answer'"]
    tracebacks, _ = held_by({0, 1}, (0, other), (1, OWN))
    tracebacks.note_shown("\n".join(OWN))
    assert tracebacks.release(explained=True) == [(0, line) for line in other]


def test_a_traceback_that_the_script_logs_is_printed_at_once() -> None:
    """The rank has not failed: it handled the exception."""
    tracebacks, printed = held_by(set(), (0, [*OWN, "continuing"]))
    assert printed == [*OWN, "continuing"]
    assert tracebacks.release(explained=True) == []


def test_output_without_end_is_not_held_back() -> None:
    """The number of held lines is bounded; nothing is lost and the order stays."""
    endless = [START, *(f"line {number}" for number in range(2 * MAX_HELD_LINES))]
    tracebacks, printed = held_by({0}, (0, endless))
    assert printed == endless
    assert tracebacks.release(explained=True) == []


def test_the_next_attempt_begins_without_what_was_held() -> None:
    """A release is printed once, and a rank that wrote too much is watched again."""
    tracebacks, _ = held_by({0}, (0, [START, *["x"] * (2 * MAX_HELD_LINES)]))
    tracebacks.release(explained=True)
    assert [line for text in OWN for line in tracebacks.hold(0, text)] == []
    assert tracebacks.release(explained=False) == [(0, line) for line in OWN]
    assert tracebacks.release(explained=False) == []
