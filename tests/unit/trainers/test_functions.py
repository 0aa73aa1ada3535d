"""The public functions in one process: where they are called, what they refuse, what a single rank gets."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank import consensus as exchange
from grpo_run.runtime.rank.consensus import ConsensusCall
from grpo_run.trainers import consensus


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ConsensusCall]:
    """The calls that are exchanged, each with another rank that agrees."""
    made: list[ConsensusCall] = []

    def answer(call: ConsensusCall) -> list[list[int]]:
        made.append(call)
        return [call.encode(), call.encode()]

    monkeypatch.setattr(consensus, "exchange", answer)
    return made


def test_a_call_names_the_line_of_the_script(calls: list[ConsensusCall]) -> None:
    """Of `any` and `all` where they are called, of `while_any` too, whoever iterates over it."""
    assert consensus.any(True)
    assert not consensus.all(False)
    rounds = iter([True, True, False])
    assert [index for index, _ in enumerate(consensus.while_any(lambda: next(rounds)))] == [0, 1]
    code = test_a_call_names_the_line_of_the_script.__code__
    assert {(call.site.file, call.site.caller) for call in calls} == {(code.co_filename, code.co_name)}
    begin = code.co_firstlineno
    assert [call.site.line - begin for call in calls] == [2, 3, 5, 5, 5]
    assert [call.site.function for call in calls] == ["any", "all", *["while_any"] * 3]
    assert [call.iteration for call in calls] == [0, 0, 1, 2, 3]
    first = calls[0].ordinal
    assert [call.ordinal - first for call in calls] == [0, 1, 2, 3, 4]


def test_a_single_process_gets_its_own_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without grpo-run and without other ranks there is nobody to ask."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [consensus.any(True), consensus.any(False), consensus.all(True), consensus.all(False)] == [
        True, False, True, False,
    ]  # fmt: skip
    left = [3]

    def more() -> bool:
        left[0] -= 1
        return left[0] >= 0

    assert len(list(consensus.while_any(more))) == 3


def test_ranks_that_nothing_connects_are_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would otherwise decide alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UsageError, match=r"consensus.any at test_functions.py:\d+ .*init_process_group first"
    ):
        consensus.any(True)


def test_another_thread_is_refused() -> None:
    """The calls of two threads have no common order on two ranks."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            consensus.all(True)
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="worker-3")
    thread.start()
    thread.join(10)
    assert "'worker-3'" in str(raised[0])
    assert "main thread only" in str(raised[0])


def test_a_flag_in_the_place_of_a_function_is_refused() -> None:
    """It would never change: the loop would be endless or empty."""
    flag: Any = True
    with pytest.raises(UsageError, match=r"while consensus.any\(not done\)"):
        consensus.while_any(flag)


def test_a_process_forked_from_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has inherited the rank's connections, and would answer for it."""
    monkeypatch.setattr(exchange, "is_forked_from_rank", lambda: True)
    with pytest.raises(UsageError, match="a rank has forked"):
        consensus.any(True)


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl,cpu:gloo", "cpu"), ("cuda:nccl", "cuda")],
)
def test_the_device_is_one_that_the_group_can_use(backends: str, device: str) -> None:
    """NCCL cannot send from host memory."""
    assert exchange._device(backends) == device
