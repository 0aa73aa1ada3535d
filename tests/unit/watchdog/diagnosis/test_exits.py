"""Which rank failed first, and which ranks only lost their peer."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_early_exit, diagnose_exits, signal_name
from grpo_run.watchdog.diagnosis.lost_peers import is_victim, reports_lost_peer
from grpo_run.watchdog.diagnosis.place import position
from grpo_run.watchdog.observation import Exit, OpenPhase, Phase, RankError, RankState, Slot, all_done
from grpo_run.watchdog.origins import Origin

MakeExit = Callable[..., Exit]
MakeError = Callable[..., RankError]
MakeSlot = Callable[..., Slot]

PEER_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4182"
)


def peer_error(make_error: MakeError, **changes: object) -> RankError:
    """What a rank raises when a peer of its collective is gone."""
    return make_error(**({"type": "RuntimeError", "message": PEER_GONE} | changes))


def test_a_killed_rank_is_the_culprit_not_its_peers(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Victims may be observed first; the kill is still the cause."""
    exits = [
        make_exit(0, order=0, error=peer_error(make_error)),
        make_exit(2, order=1, error=peer_error(make_error)),
        make_exit(1, order=2, signal=signal.SIGKILL),
    ]
    verdict = diagnose_exits(exits, {rank: make_slot(rank) for rank in range(3)}, best_position=(1, 7))
    assert (verdict.cause, verdict.culprits) == (Cause.signal, (1,))
    assert verdict.waiters == (0, 2)
    assert verdict.sentence == "Rank 1 was killed by SIGKILL in step 8 (phase generate)."
    assert not verdict.deterministic


def test_an_exception_of_its_own_is_the_cause_not_the_connection_errors(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Even if a victim's error was recorded a moment earlier."""
    exits = [
        make_exit(0, order=0, error=peer_error(make_error, wall_time=999.0)),
        make_exit(1, order=1, error=make_error(wall_time=1000.0)),
    ]
    verdict = diagnose_exits(exits, {rank: make_slot(rank) for rank in range(2)}, best_position=(1, 7))
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 1)
    assert verdict.deterministic


def test_the_earlier_of_two_exceptions_is_the_cause(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """By the time they were raised, not by the order of the exits."""
    exits = [
        make_exit(0, order=0, error=make_error(wall_time=1000.5)),
        make_exit(1, order=1, error=make_error(wall_time=1000.25)),
    ]
    assert diagnose_exits(exits, {0: make_slot(0), 1: make_slot(1)}, best_position=(1, 7)).culprit == 1


def test_an_abort_that_follows_an_exception_is_a_victim(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """NCCL's watchdog aborts the peers of a rank that raised; the exception is the cause."""
    exits = [make_exit(1, order=0, error=make_error()), make_exit(0, order=1, signal=signal.SIGABRT)]
    verdict = diagnose_exits(exits, {0: make_slot(0), 1: make_slot(1)}, best_position=(1, 7))
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 1)


def test_no_rank_is_blamed_if_all_are_victims(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """The cause is on another node: unknown, without a culprit."""
    exits = [make_exit(rank, order=rank, error=peer_error(make_error)) for rank in range(2)]
    verdict = diagnose_exits(exits, {rank: make_slot(rank) for rank in range(2)}, best_position=(1, 7))
    assert (verdict.cause, verdict.culprits, verdict.culprit) == (Cause.unknown, (), None)
    assert verdict.confidence == "unknown"
    assert not verdict.deterministic


@pytest.mark.parametrize(
    "message",
    [
        PEER_GONE,
        "Gloo connectFullMesh failed with [..] no error",
        "Application timeout caused pair closure; Socket timeout",
        "NCCL communicator was aborted on rank 3",
        "The client socket has timed out; DistNetworkError",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_errors_of_the_collective_mark_a_victim(
    make_exit: MakeExit, make_error: MakeError, message: str
) -> None:
    """torch's messages for a peer that has exited."""
    assert is_victim(make_exit(0, error=make_error(type="DistBackendError", message=message)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ValueError", "bad reward"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("TimeoutError", "timed out"),
    ],
)
def test_other_errors_do_not_mark_a_victim(
    make_exit: MakeExit, make_error: MakeError, kind: str, message: str
) -> None:
    """Their messages do not report a peer that has exited."""
    assert not is_victim(make_exit(0, error=make_error(type=kind, message=message)))


NESTED = """\
Traceback (most recent call last):
  File "train.py", line 5, in step
    work.wait()
RuntimeError: Connection closed by peer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in cleanup
    raise KeyError(name)
"""


@pytest.mark.parametrize(
    ("last", "lost"),
    [
        (f"RuntimeError: {PEER_GONE}", True),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1\nncclRemoteError: A call failed", True),
        ("RuntimeError: Connection closed by peer\n[rank0] output of an exit handler", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("ValueError: bad", False),
        ("RuntimeError", False),
        ("", False),
    ],
)
def test_a_printed_traceback_is_judged_by_its_last_error(last: str, lost: bool) -> None:
    """The same rule as for error files; what precedes the exception does not matter."""
    assert reports_lost_peer((NESTED + last).splitlines()) is lost
    assert not reports_lost_peer([])


def test_a_rank_without_an_error_is_no_victim(make_exit: MakeExit) -> None:
    """Without an error record nothing shows that a peer exited."""
    assert not is_victim(make_exit(0))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
    ],
)
def test_a_lost_reward_server_is_an_error_of_its_own(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot, kind: str, message: str
) -> None:
    """A reward function that loses its HTTP server is the cause; no other node is blamed."""
    exits = [make_exit(0, error=make_error(type=kind, message=message))]
    verdict = diagnose_exits(exits, {0: make_slot(0)}, best_position=(1, 7))
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 0)


def test_failing_before_the_first_step_is_a_startup_failure(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """The advice says that a restart would not help."""
    slot = make_slot(0, train_call=0, step=0, phases=(), state=RankState.starting)
    verdict = diagnose_exits([make_exit(0, error=make_error())], {0: slot}, best_position=(0, 0))
    assert verdict.cause is Cause.startup_failure
    assert verdict.sentence == "Rank 0 raised ZeroDivisionError before the first step: division by zero"
    assert any("before its first step" in line for line in verdict.advice)


def test_an_unwritten_slot_is_a_startup_failure(make_exit: MakeExit, make_error: MakeError) -> None:
    """The rank failed before it wrote its slot."""
    verdict = diagnose_exits([make_exit(0, error=make_error())], {0: None}, best_position=(0, 0))
    assert (verdict.cause, verdict.phase) == (Cause.startup_failure, None)


@pytest.mark.parametrize(
    "changes", [{"train_call": 2, "step": 0}, {"train_call": 1, "step": 5, "resumed_step": 5}]
)
def test_failing_in_a_later_call_or_after_resuming_is_not_startup(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot, changes: dict[str, int]
) -> None:
    """Work had been done; a restart resumes from it."""
    verdict = diagnose_exits(
        [make_exit(0, error=make_error())], {0: make_slot(0, **changes)}, best_position=(1, 5)
    )
    assert verdict.cause is Cause.exception


def test_an_exit_without_an_exception_is_described_by_its_code(
    make_exit: MakeExit, make_slot: MakeSlot
) -> None:
    """`os._exit(3)` leaves only the exit code."""
    verdict = diagnose_exits(
        [make_exit(1, exit_code=3)], {0: make_slot(0), 1: make_slot(1)}, best_position=(1, 7)
    )
    assert verdict.culprit == 1
    assert verdict.location is None
    assert verdict.sentence == (
        "Rank 1 exited with code 3 in step 8 (phase generate) without finishing the script."
    )


def test_the_verdict_has_the_location_of_the_exception(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """File, line and function of the user's frame, and the traceback."""
    verdict = diagnose_exits([make_exit(0, error=make_error())], {0: make_slot(0)}, best_position=(1, 7))
    assert verdict.location is not None
    assert verdict.location.as_json() == {"file": "/home/user/train.py", "line": 12, "function": "reward"}
    assert verdict.traceback == "Traceback (most recent call last): ..."


def test_the_sentence_is_one_line(make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot) -> None:
    """It quotes the first line of a long message, cut to 200 characters."""
    error = make_error(message="shapes differ " + "x" * 1000 + "\nsecond line\nthird")
    sentence = diagnose_exits([make_exit(0, error=error)], {0: make_slot(0)}, best_position=(1, 7)).sentence
    assert "\n" not in sentence
    assert "shapes differ" in sentence
    assert len(sentence) < 320


def test_an_empty_message_leaves_a_complete_sentence(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """`raise ValueError` has no message."""
    error = make_error(type="AssertionError", message="")
    sentence = diagnose_exits([make_exit(0, error=error)], {0: make_slot(0)}, best_position=(1, 7)).sentence
    assert sentence == "Rank 0 raised AssertionError in step 8 (phase generate)."


def test_the_step_is_the_highest_of_all_ranks(make_exit: MakeExit, make_slot: MakeSlot) -> None:
    """The killed rank may be one step behind, or its slot unreadable."""
    exits = [make_exit(0, signal=signal.SIGKILL)]
    assert diagnose_exits(exits, {0: None, 1: make_slot(1, step=9)}, best_position=(1, 8)).step == 9


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"step": 7}, {"step": 7}, True),
        ({"step": 7}, {"step": 8}, False),
    ],
)
def test_the_signature_identifies_a_repeated_failure(
    make_exit: MakeExit,
    make_error: MakeError,
    make_slot: MakeSlot,
    first: dict[str, int],
    second: dict[str, int],
    same: bool,
) -> None:
    """The same error at the same line and step is the same failure; at another step it is not."""
    signatures = {
        diagnose_exits(
            [make_exit(0, error=make_error(wall_time=at))], {0: make_slot(0, **changes)}, best_position=(1, 7)
        ).signature
        for at, changes in ((1.0, first), (2.0, second))
    }
    assert len(signatures) == (1 if same else 2)


@given(
    order=st.permutations(range(4)),
    killed=st.integers(0, 3),
    times=st.lists(st.floats(0, 1e9), min_size=4, max_size=4),
)
def test_the_culprit_does_not_depend_on_the_order_of_the_list(
    order: list[int], killed: int, times: list[float]
) -> None:
    """The killed rank is the culprit for any order of the exits."""
    exits = [
        Exit(
            rank=rank, pid=rank + 1, order=order.index(rank),
            exit_code=None if rank == killed else 1, signal=signal.SIGKILL if rank == killed else None,
            error=None if rank == killed else RankError(
                type="RuntimeError", message=PEER_GONE, traceback="", location=None, wall_time=times[rank]
            ),
        )
        for rank in order
    ]  # fmt: skip
    verdict = diagnose_exits(exits, dict.fromkeys(range(4)), best_position=(1, 1))
    assert verdict.culprits == (killed,)
    assert set(verdict.waiters) == set(range(4)) - {killed}


def test_signals_have_names_and_unknown_ones_numbers() -> None:
    """`SIGKILL`, not 9; an unknown signal is described by its number."""
    assert signal_name(9) == "SIGKILL"
    assert signal_name(45) == "signal 45"


def test_a_run_is_done_when_every_rank_is(make_slot: MakeSlot) -> None:
    """One rank that is not done, or cannot be read, is enough to be not done."""
    done = make_slot(0, state=RankState.done)
    assert all_done([done, done])
    assert not all_done([done, make_slot(1)])
    assert not all_done([done, None])
    assert not all_done([])


def test_the_exit_code_of_a_script_is_reported_as_such(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """`sys.exit(2)` is an exit with a code, not an exception."""
    ended = make_exit(0, order=0, exit_code=2, error=make_error(type="SystemExit", message="2"))
    verdict = diagnose_exits([ended], {0: make_slot(0)}, best_position=(0, 0))
    assert "exited with code 2" in verdict.sentence
    assert "SystemExit" not in verdict.sentence


def test_an_early_exit_is_reported_with_its_line(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """The sentence names a rank that was still training."""
    error = make_error(type="SystemExit", message="0", location=("/home/user/train.py", 40, "main"))
    left = [make_exit(1, exit_code=0, order=0, error=error, completed=True)]
    verdict = diagnose_early_exit(left, [make_exit(0, order=1)], {0: make_slot(0), 1: make_slot(1)})
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert (
        verdict.sentence
        == "Rank 1 exited in step 8 (phase generate), at train.py:40 in main, while rank 0 was still training."
    )
    assert verdict.location is not None
    assert verdict.location.line == 40
    assert (verdict.confidence, verdict.deterministic) == ("proved", True)


def test_an_exception_is_reported_where_it_was_raised(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """It has left the phase by the time at which the slot is read."""
    error = make_error(phases=(Phase.data, Phase.score, Phase.reward))
    slots = {0: make_slot(0), 1: make_slot(1)}
    verdict = diagnose_exits([make_exit(1, order=0, error=error)], slots, best_position=(1, 7))
    assert verdict.phase == "reward"
    assert verdict.sentence.startswith("Rank 1 raised ZeroDivisionError in step 8 (phase reward): ")


def test_an_exception_of_a_callback_names_it(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Inside the computation of a step it belongs to that step."""
    error = make_error(phases=(Phase.optimizer, Phase.callback), callback="Mine.on_step_end")
    verdict = diagnose_exits([make_exit(1, order=0, error=error)], {1: make_slot(1)}, best_position=(1, 7))
    assert "in step 8 (callback Mine.on_step_end)" in verdict.sentence


def test_all_ranks_that_exited_early_are_named(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """In ascending order; the first to exit gives the line; slots may be missing."""
    late = make_exit(0, exit_code=0, order=2, error=make_error(location=("late.py", 2, "f")))
    first = make_exit(3, exit_code=0, order=0, error=make_error(location=("first.py", 1, "f")))
    slots = {0: None, 1: make_slot(1, step=9), 2: None, 3: None}
    verdict = diagnose_early_exit([late, first], [make_exit(2, order=1), make_exit(1, order=3)], slots)
    assert (verdict.culprits, verdict.waiters, verdict.step) == ((0, 3), (1, 2), 9)
    assert verdict.sentence.startswith("Ranks 0 and 3 exited after step 9, at first.py:1 in f, while rank 1 ")
    assert verdict.phase is None


def test_a_repeated_early_exit_has_the_same_signature(make_exit: MakeExit, make_slot: MakeSlot) -> None:
    """It consists of ranks and step, with or without a line."""
    failed = [make_exit(0, order=1)]
    first = diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0)})
    assert first.location is None
    assert (
        diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0)}).signature
        == first.signature
    )
    assert (
        diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0, step=8)}).signature
        != first.signature
    )
    assert (
        diagnose_early_exit([make_exit(2, exit_code=0)], failed, {0: make_slot(0)}).signature
        != first.signature
    )


@pytest.mark.parametrize(
    ("step", "phase", "text"),
    [
        (14, "forward_backward", "in step 15 (phase forward_backward)"),
        (0, "data", "in step 1 (phase data)"),
        (14, "checkpoint", "after step 14 (phase checkpoint)"),
        (14, "idle", "after step 14 (phase idle)"),
        (0, "callback", "before the first step (phase callback)"),
        (14, None, "after step 14"),
        (0, None, "before the first step"),
        (0, "startup", "before the first step"),
    ],
)
def test_a_fault_is_placed_in_the_step_that_an_injection_names(
    step: int, phase: str | None, text: str
) -> None:
    """`--inject kill@rank1:step15` is reported in step 15, although 14 steps are completed."""
    assert position(step, phase) == text


@pytest.mark.parametrize(
    ("phases", "place"),
    [
        ((Phase.optimizer,), "in step 8 (phase optimizer)"),
        ((Phase.optimizer, Phase.callback), "in step 8 (phase callback)"),
        ((Phase.forward_backward, Phase.callback), "in step 8 (phase callback)"),
        ((Phase.optimizer, Phase.callback, Phase.checkpoint), "in step 8 (phase checkpoint)"),
        ((Phase.data, Phase.callback), "after step 7 (phase callback)"),
        ((Phase.data, Phase.checkpoint), "after step 7 (phase checkpoint)"),
    ],
)
def test_a_callback_at_the_end_of_a_step_belongs_to_the_step(
    make_exit: MakeExit, make_slot: MakeSlot, phases: tuple[Phase, ...], place: str
) -> None:
    """Whether it was killed or raised; the step is the culprit's, although its peers have finished step 8."""
    slots = {
        0: make_slot(0, step=8),
        1: make_slot(1, step=7, phases=tuple(OpenPhase(phase=phase, since_seconds=9.0) for phase in phases)),
    }
    verdict = diagnose_exits([make_exit(1, signal=signal.SIGKILL)], slots, best_position=(1, 7))
    assert verdict.sentence == f"Rank 1 was killed by SIGKILL {place}."


@pytest.mark.parametrize(
    ("callback", "place"), [("Log.on_step_begin", "in step 8"), ("Log.on_log", "after step 7")]
)
def test_a_callback_at_the_beginning_of_a_step_belongs_to_the_step(
    make_exit: MakeExit, make_slot: MakeSlot, callback: str, place: str
) -> None:
    """It is called while the rank is still in the phase that loads data."""
    phases = (
        OpenPhase(phase=Phase.data, since_seconds=8.0),
        OpenPhase(phase=Phase.callback, since_seconds=9.0, callback=callback),
    )
    slots = {0: make_slot(0, step=7, phases=phases)}
    verdict = diagnose_exits([make_exit(0, signal=signal.SIGKILL)], slots, best_position=(1, 7))
    assert verdict.sentence == f"Rank 0 was killed by SIGKILL {place} (callback {callback})."


def test_an_exception_is_blamed_before_an_exit_without_one(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """A rank that exits with a code only may follow another rank's exception, whenever each was seen."""
    exits = [make_exit(0, order=0, error=None), make_exit(1, order=1, error=make_error(wall_time=1000.0))]
    assert diagnose_exits(exits, {0: make_slot(0), 1: make_slot(1)}, best_position=(1, 7)).culprit == 1


def test_the_first_of_several_killed_ranks_is_blamed(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Ranks killed later do not move the blame, and neither does an exception seen after the first kill."""
    exits = [
        make_exit(2, order=0, signal=signal.SIGKILL),
        make_exit(1, order=1, error=make_error()),
        make_exit(0, order=2, signal=signal.SIGKILL),
    ]
    slots = {rank: make_slot(rank) for rank in range(3)}
    assert diagnose_exits(exits, slots, best_position=(1, 7)).culprit == 2


def test_the_earliest_exception_is_compared_with_the_first_kill(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """An exception seen before the kill is the cause, also when another rank raised after it."""
    exits = [
        make_exit(2, order=0, error=make_error(wall_time=1000.0)),
        make_exit(1, order=1, signal=signal.SIGKILL),
        make_exit(0, order=2, error=make_error(wall_time=1001.0)),
    ]
    slots = {rank: make_slot(rank) for rank in range(3)}
    assert diagnose_exits(exits, slots, best_position=(1, 7)).culprit == 2


def test_an_exit_without_an_error_does_not_hide_an_exception_before_a_kill(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """The exception was first, the kill and the exit followed it."""
    exits = [
        make_exit(0, order=0, error=make_error()),
        make_exit(1, order=1, signal=signal.SIGABRT),
        make_exit(2, order=2),
    ]
    slots = {rank: make_slot(rank) for rank in range(3)}
    assert diagnose_exits(exits, slots, best_position=(1, 7)).culprit == 0


def test_the_first_victim_seen_describes_an_incident_without_a_culprit(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Its traceback is the one that is shown."""
    exits = [
        make_exit(rank, order=rank, error=peer_error(make_error, traceback=f"traceback of rank {rank}"))
        for rank in range(3)
    ]
    verdict = diagnose_exits(exits, {rank: make_slot(rank) for rank in range(3)}, best_position=(1, 7))
    assert verdict.traceback == "traceback of rank 0"


def test_without_a_readable_slot_the_step_is_zero(make_exit: MakeExit, make_error: MakeError) -> None:
    """Verdicts of both kinds state a step, known or not."""
    failed = make_exit(0, error=make_error())
    assert diagnose_exits([failed], {0: None}, best_position=(0, 0)).step == 0
    assert diagnose_early_exit([make_exit(1, exit_code=0)], [failed], {0: None, 1: None}).step == 0


def test_a_verdict_names_the_rank_that_left_and_its_phase(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """One rank is named in the singular, and the phase is the one it left in."""
    left, failed = [make_exit(1, exit_code=0)], [make_exit(0, error=peer_error(make_error))]
    verdict = diagnose_early_exit(left, failed, {0: make_slot(0), 1: make_slot(1)})
    assert verdict.sentence.startswith("Rank 1 ")
    assert verdict.phase == "generate"


@pytest.mark.parametrize(
    ("position", "cause"),
    [
        ({"train_call": 0, "step": 0, "resumed_step": 0}, Cause.startup_failure),
        ({"train_call": 1, "step": 0, "resumed_step": 0}, Cause.startup_failure),
        ({"train_call": 1, "step": 0, "resumed_step": 3}, Cause.exception),
        ({"train_call": 1, "step": 4, "resumed_step": 3}, Cause.exception),
        ({"train_call": 2, "step": 0, "resumed_step": 0}, Cause.exception),
    ],
)
def test_an_exception_before_the_first_step_is_a_startup_failure(
    make_exit: MakeExit,
    make_error: MakeError,
    make_slot: MakeSlot,
    position: dict[str, int],
    cause: Cause,
) -> None:
    """Neither a resumed call nor a second one is a start-up."""
    verdict = diagnose_exits(
        [make_exit(0, error=make_error())], {0: make_slot(0, **position)}, best_position=(1, 7)
    )
    assert verdict.cause is cause


def test_a_consensus_error_is_a_mismatch_whatever_made_its_name(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """The type's name is read from a file, so it is compared by value."""
    error = make_error(type="ConsensusError")
    verdict = diagnose_exits([make_exit(0, error=error)], {0: make_slot(0)}, best_position=(1, 7))
    assert verdict.cause is Cause.collective_mismatch


def test_only_the_first_200_characters_of_a_message_are_quoted(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """A message may hold a whole batch."""
    error = make_error(type="ValueError", message="x" * 500)
    sentence = diagnose_exits([make_exit(0, error=error)], {0: make_slot(0)}, best_position=(1, 7)).sentence
    assert sentence.count("x") == 200


def test_signatures_tell_kinds_of_failure_apart(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """A restart compares them to see whether a failure repeats."""

    def signature(**exit: object) -> str:
        return diagnose_exits([make_exit(0, **exit)], {0: make_slot(0)}, best_position=(1, 7)).signature

    assert signature(signal=signal.SIGSEGV).startswith(f"signal:{int(signal.SIGSEGV)}:")
    assert signature(error=make_error(type="KeyError", location=None)) == "KeyError@?:0:step7"
    assert signature(error=make_error(type="KeyError", location=("a.py", 3, "f"))) == "KeyError@a.py:3:step7"
    assert signature(error=None, exit_code=5) == "exit:5:step7"


def test_advice_is_given_for_failures_before_any_step_only(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """And only for exceptions."""

    def advice(best_position: tuple[int, int], **exit: object) -> tuple[str, ...]:
        return diagnose_exits([make_exit(0, **exit)], {0: make_slot(0)}, best_position=best_position).advice

    never = (int("0"), int("0"))  # another object than any constant of the module
    assert advice(never, error=make_error())
    assert not advice((1, 7), error=make_error())
    assert not advice((0, 0), error=None, exit_code=5)
    assert advice((1, 7), signal=int("9"))


@pytest.mark.parametrize(
    ("phases", "starting"),
    [
        ((), True),
        ((Phase.startup,), True),
        ((Phase.idle,), True),
        ((Phase.idle, Phase.startup), True),
        ((Phase.generate,), False),
        ((Phase.startup, Phase.generate), False),
    ],
)
def test_a_failure_outside_the_steps_of_a_call_is_one_of_the_start(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot, phases: tuple[Phase, ...], starting: bool
) -> None:
    """By the phases of the exception, or else by those on the board; a kill and a lost peer are none."""
    slot = make_slot(0, phases=tuple(OpenPhase(phase=phase, since_seconds=9.0) for phase in phases))

    def verdict_starts(exit: Exit, slot: Slot | None = slot) -> bool:
        return diagnose_exits([exit], {0: slot}, best_position=(1, 7)).starting

    assert verdict_starts(make_exit(0)) is starting
    assert verdict_starts(make_exit(0, error=make_error())) is starting
    assert verdict_starts(make_exit(0, error=make_error(phases=phases)), make_slot(0)) is starting
    assert verdict_starts(make_exit(0), None)
    assert not verdict_starts(make_exit(0, signal=signal.SIGKILL))
    assert not verdict_starts(make_exit(0, error=peer_error(make_error)))


def test_a_rank_that_exits_with_code_zero_has_left_early(make_exit: MakeExit, make_slot: MakeSlot) -> None:
    """The advice says how training is ended early; no other code gets it."""
    verdict = diagnose_exits([make_exit(0, exit_code=0)], {0: make_slot(0)}, best_position=(1, 7))
    assert verdict.cause is Cause.rank_exited_early
    assert any("should_training_stop" in line for line in verdict.advice)
    for code in (-1, 1, 3):
        other = diagnose_exits([make_exit(0, exit_code=code)], {0: make_slot(0)}, best_position=(1, 7))
        assert other.cause is Cause.exception
        assert not other.advice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
def test_only_a_kill_is_advised_to_look_for_the_out_of_memory_killer(
    make_exit: MakeExit, make_slot: MakeSlot, number: signal.Signals
) -> None:
    """It sends no other signal."""
    verdict = diagnose_exits([make_exit(0, signal=number)], {0: make_slot(0)}, best_position=(1, 7))
    assert not verdict.advice


def test_a_kill_is_blamed_before_an_exit_that_left_no_error(make_exit: MakeExit, make_slot: MakeSlot) -> None:
    """Even if the exit was seen first: a library may have ended the rank because its peer was killed."""
    exits = [make_exit(0, order=0), make_exit(1, order=1, signal=signal.SIGKILL)]
    verdict = diagnose_exits(exits, {0: make_slot(0), 1: make_slot(1)}, best_position=(1, 7))
    assert verdict.culprit == 1


def test_a_callback_on_the_board_is_named_if_the_exception_says_nothing(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """An exception that left its phases says by itself whether a callback raised it."""
    phases = (
        OpenPhase(phase=Phase.data, since_seconds=8.0),
        OpenPhase(phase=Phase.callback, since_seconds=9.0, callback="Mine.on_log"),
    )
    slots = {0: make_slot(0, phases=phases)}

    def sentence(**error: object) -> str:
        exits = [make_exit(0, error=make_error(**error))]
        return diagnose_exits(exits, slots, best_position=(1, 7)).sentence

    assert "after step 7 (callback Mine.on_log)" in sentence()
    assert "in step 8 (phase generate)" in sentence(phases=(Phase.data, Phase.generate))
    assert "(callback Its.on_save)" in sentence(phases=(Phase.callback,), callback="Its.on_save")


def test_a_phase_deep_inside_the_computation_of_a_step_belongs_to_the_step(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """Whatever phases surround the computation."""
    error = make_error(phases=(Phase.data, Phase.optimizer, Phase.callback))
    verdict = diagnose_exits([make_exit(0, error=error)], {0: make_slot(0)}, best_position=(1, 7))
    assert "in step 8 (phase callback)" in verdict.sentence


@pytest.mark.parametrize(
    ("traceback", "lost"),
    [
        (["RuntimeError: Connection closed by peer"], True),
        (['  File "<string>", line 1, in <module>', "RuntimeError: Connection closed by peer"], True),
        (['  File "a.py", line 1, in f', "    g()", "RuntimeError: no answer:", "Connection closed by peer"], True),
        (['  File "a.py", line 1, in f', '    raise Error("Broken pipe")', "RuntimeError: bad"], False),
        (["", '  File "a.py", line 1, in f', '    raise Error("Broken pipe")', "RuntimeError: bad"], False),
        (["RuntimeError: Broken pipe", '  File "a.py", line 1, in f', "    g()", "RuntimeError: bad"], False),
    ],
)  # fmt: skip
def test_only_the_error_itself_and_what_follows_says_that_a_peer_exited(
    traceback: list[str], lost: bool
) -> None:
    """Not the script's source lines, which a traceback quotes; a frame may have none."""
    assert reports_lost_peer(traceback) is lost


def test_a_verdict_says_where_the_failure_comes_from(
    make_exit: MakeExit, make_error: MakeError, make_slot: MakeSlot
) -> None:
    """A script that refuses its arguments ends the run; the same exit in a step does not."""
    refused = make_exit(0, exit_code=2, error=make_error(type="SystemExit", message="2"))
    start = diagnose_exits([refused], {0: make_slot(0, phases=())}, best_position=(1, 7))
    assert (start.origin, start.final) == (Origin.usage, "the script refuses its arguments")
    step = diagnose_exits([refused], {0: make_slot(0)}, best_position=(1, 7))
    assert (step.origin, step.final) == (Origin.code, "")
