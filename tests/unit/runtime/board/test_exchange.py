"""The exchange of messages on the board: order, earlier attempts, damaged messages, and waiting without the
CPU.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.board import exchange as exchange_module
from grpo_run.runtime.board import exchange as futex
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.exchange import CHANNELS, MAX_MESSAGE_BYTES, Exchange, Message

VOTE, CONSENSUS = CHANNELS
RANKS = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A board of three slots."""
    path = tmp_path / "board.mmap"
    Board.create(path, RANKS)
    return path


def end(path: Path, rank: int, *, attempt: int = 0, channel: str = VOTE) -> Exchange:
    """A rank's end of a channel, on a mapping of its own."""
    opened = Board.open(path, writable=True).exchange(rank, attempt=attempt, channel=channel)
    assert opened is not None
    return opened


def received(exchange: Exchange, rank: int, sequence: int) -> Message:
    """A rank's message; waits for it for a few seconds."""
    deadline = time.monotonic() + 20.0
    while True:
        last = exchange.last(rank)
        message = exchange.receive(rank, sequence)
        if message is not None:
            return message
        assert time.monotonic() < deadline, f"message {sequence} of rank {rank} did not come"
        exchange.wait(rank, last, 20.0)


def in_processes(target: Callable[..., None], *arguments: tuple[Any, ...]) -> None:
    """Run a function in one process for each tuple of arguments."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def _content(rank: int, sequence: int) -> bytes:
    return random.Random(1000 * rank + sequence).randbytes(sequence * 7 % MAX_MESSAGE_BYTES)


def _talk(path: Path, rank: int, rounds: int) -> None:
    exchange = end(path, rank)
    pause = random.Random(rank)
    for sequence in range(1, rounds + 1):
        exchange.send(sequence, Message(sequence % 5, _content(rank, sequence)))
        if pause.random() < 0.1:
            time.sleep(pause.random() / 2000)
        for other in range(RANKS):
            assert received(exchange, other, sequence) == (sequence % 5, _content(other, sequence))


def test_processes_receive_every_message_of_every_rank(path: Path) -> None:
    """Two thousand messages of all sizes each, at varying speeds: none is lost, torn or taken for another."""
    in_processes(_talk, *[(path, rank, 2000) for rank in range(RANKS)])


def test_messages_of_an_earlier_attempt_are_never_received(path: Path) -> None:
    """Even if the board was not cleared: the number of the attempt belongs to each message."""
    end(path, 1, attempt=3).send(1, Message(1, b"old"))
    here, there = end(path, 0, attempt=4), end(path, 1, attempt=4)
    assert (here.last(1), here.receive(1, 1)) == (0, None)
    there.send(1, Message(1, b"new"))
    assert here.receive(1, 1) == (1, b"new")


def test_a_new_attempt_clears_all_messages(tmp_path: Path) -> None:
    """The supervisor does it before the ranks start."""
    board = Board.create(tmp_path / "board.mmap", 2)
    board.begin_attempt(1)
    for rank in range(2):
        end(tmp_path / "board.mmap", rank, attempt=1).send(1, Message(1, b"old"))
    assert [board.messages_sent(rank) for rank in range(2)] == [{VOTE: 1}, {VOTE: 1}]
    board.begin_attempt(2)
    assert [board.messages_sent(rank) for rank in range(2)] == [{}, {}]
    assert end(tmp_path / "board.mmap", 0, attempt=1).receive(1, 1) is None


def test_the_supervisor_counts_the_messages_of_this_attempt(path: Path) -> None:
    """By channel; it maps the board for reading only."""
    sender = end(path, 1)
    for sequence in (1, 2, 3):
        sender.send(sequence, Message(1, b""))
    end(path, 1, channel=CONSENSUS).send(1, Message(1, b""))
    end(path, 2, attempt=9).send(7, Message(1, b""))
    board = Board.open(path)
    assert [board.messages_sent(rank) for rank in range(RANKS)] == [{}, {VOTE: 3, CONSENSUS: 1}, {}]


@pytest.mark.parametrize("byte", range(30))
def test_a_torn_message_is_not_received(path: Path, byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever byte of it has not arrived yet; it is received once it has."""
    monkeypatch.setattr(exchange_module, "READ_PAUSE_SECONDS", 0.0001)
    content = b"a vote"
    here, there = end(path, 0), end(path, 1)
    board = path.read_bytes()
    there.send(1, Message(1, content))
    complete = path.read_bytes()
    places = [at for at in range(len(board)) if board[at] != complete[at]]
    word = places[0]  # the word of the channel comes first
    changed = [at for at in places if at >= word + 8]
    torn = changed[byte % len(changed)]
    with open(path, "r+b", buffering=0) as file:
        file.seek(torn)
        file.write(board[torn : torn + 1])
        with pytest.raises(RuntimeError, match="message 1 of local rank 1 on the board cannot be read"):
            here.receive(1, 1)
        file.seek(torn)
        file.write(complete[torn : torn + 1])
    assert here.receive(1, 1) == (1, content)


def test_a_message_that_becomes_visible_late_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor that does not make two stores visible in order."""
    here, there = end(path, 0), end(path, 1)
    there.send(1, Message(1, b"old"))
    there.send(2, Message(1, b"two"))
    late = path.read_bytes()
    there.send(3, Message(1, b"new"))
    complete = path.read_bytes()
    changed = [at for at in range(len(late)) if late[at] != complete[at]][1:]

    def write(content: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            for at in changed:
                file.seek(at)
                file.write(content[at : at + 1])

    write(late)
    monkeypatch.setattr(exchange_module.time, "sleep", lambda seconds: write(complete))
    assert here.receive(1, 3) == (1, b"new")


def test_a_wait_that_begins_after_the_message_returns_at_once(path: Path) -> None:
    """The message came between the reader's look and its wait."""
    here = end(path, 0)
    last = here.last(1)
    end(path, 1).send(1, Message(1, b"x"))
    began = time.monotonic()
    here.wait(1, last, 30.0)
    assert time.monotonic() - began < 10.0


def test_a_waiter_sleeps(path: Path) -> None:
    """It uses no CPU time and is not scheduled: the proof of a deadlock requires that."""
    here = end(path, 0)
    waiter = threading.Thread(target=here.wait, args=(1, 0, 30.0))
    waiter.start()
    assert waiter.native_id is not None

    def switches() -> list[str]:
        status = Path(f"/proc/self/task/{waiter.native_id}/status").read_text()
        return [line for line in status.splitlines() if "ctxt_switches" in line or line.startswith("State")]

    deadline, before, after = time.monotonic() + 20.0, [""], [""]
    while before != after or before == [""]:
        assert time.monotonic() < deadline
        before = switches()
        time.sleep(0.2)
        after = switches()
    assert any("S (sleeping)" in line for line in before)
    end(path, 1).send(1, Message(1, b""))
    waiter.join(20)
    assert not waiter.is_alive()


def test_a_signal_interrupts_a_wait(path: Path) -> None:
    """Its handler runs at once, and may raise."""

    class Interrupted(Exception):
        """Raised by the handler."""

    def handle(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, handle)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR2))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            end(path, 0).wait(1, 0, 30.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert time.monotonic() - began < 20.0


def test_waiting_works_where_the_system_call_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By polling."""
    monkeypatch.setattr(futex, "_number", None)
    here = end(path, 0)
    timer = threading.Timer(0.1, end(path, 1).send, (1, Message(1, b"x")))
    timer.start()
    assert received(here, 1, 1) == (1, b"x")


def test_a_refused_system_call_is_not_a_busy_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may refuse it."""
    slept: list[float] = []
    monkeypatch.setattr(futex, "_number", 100_000)  # no such system call
    monkeypatch.setattr(futex.time, "sleep", slept.append)
    futex.wait(0, 0, 1.0)
    assert slept == [futex.POLL_SECONDS]
