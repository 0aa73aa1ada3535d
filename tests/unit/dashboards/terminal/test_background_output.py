"""What is printed never blocks: a reader that stops costs output at most, and nobody waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.dashboards.terminal.background_output import BackgroundOutput

PIPE_BYTES = 64 << 10
SELECT_LIMIT = 1024
SOON_SECONDS = 5.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):  # closed by the test
            os.close(descriptor)


def read_all(reader: int, size: int) -> bytes:
    """Read so many bytes."""
    content = b""
    while len(content) < size:
        content += os.read(reader, size - len(content))
    return content


def test_writing_does_not_wait_for_a_reader(pipe: tuple[int, int]) -> None:
    """Much more than a pipe holds; all of it arrives, in order, when somebody reads."""
    reader, writer = pipe
    output = BackgroundOutput()
    lines = [f"{number:07} {'x' * 50}\n".encode() for number in range(20_000)]
    began = time.monotonic()
    for line in lines:
        output.write(writer, line)
    assert time.monotonic() - began < SOON_SECONDS
    assert read_all(reader, sum(map(len, lines))) == b"".join(lines)
    assert output.finish(lambda: False)


def test_both_streams_are_written_in_the_order_of_the_calls(pipe: tuple[int, int]) -> None:
    """On a terminal they are one."""
    reader, writer = pipe
    other = os.dup(writer)
    output = BackgroundOutput()
    for number in range(1000):
        output.write((writer, other)[number % 2], f"{number}\n".encode())
    assert output.finish(lambda: False)
    os.close(other)
    expected = "".join(f"{number}\n" for number in range(1000)).encode()
    assert read_all(reader, len(expected)) == expected


def test_what_does_not_fit_is_counted(pipe: tuple[int, int]) -> None:
    """The memory of the supervisor is bounded, and the reader learns what is missing."""
    reader, writer = pipe
    os.write(writer, bytes(PIPE_BYTES))  # the pipe is full before
    output = BackgroundOutput(max_bytes=4 * PIPE_BYTES)
    for _ in range(40):
        output.write(writer, b"y" * (PIPE_BYTES // 2 - 1) + b"\n")
    assert set(read_all(reader, PIPE_BYTES)) == {0}
    kept = 8 * (PIPE_BYTES // 2)
    assert set(read_all(reader, kept)) == {ord("y"), ord("\n")}
    assert output.finish(lambda: False)
    output.write(writer, b"last\n")
    assert output.finish(lambda: False)
    assert os.read(reader, 1000) == b"... 1.0 MB of output were not shown: nothing read them\nlast\n"


def test_the_end_does_not_wait_for_ever(pipe: tuple[int, int]) -> None:
    """Not for a reader that takes nothing, and not once the user asks again."""
    _, writer = pipe
    output = BackgroundOutput()
    output.write(writer, bytes(4 * PIPE_BYTES))
    assert not output.finish(lambda: False, patience_seconds=0.2)
    assert not output.finish(lambda: True)


def test_the_end_waits_for_a_slow_reader(pipe: tuple[int, int]) -> None:
    """As long as it takes something now and then."""
    reader, writer = pipe
    output = BackgroundOutput()
    output.write(writer, bytes(8 * PIPE_BYTES))

    def read_slowly() -> None:
        left = 8 * PIPE_BYTES
        while left:
            time.sleep(0.05)
            left -= len(os.read(reader, PIPE_BYTES // 2))

    thread = threading.Thread(target=read_slowly)
    thread.start()
    assert output.finish(lambda: False, patience_seconds=1.0)
    thread.join()


def test_a_reader_that_is_gone_is_an_error_of_later_writes(pipe: tuple[int, int]) -> None:
    """As without a thread: the terminal falls silent."""
    reader, writer = pipe
    os.close(reader)
    output = BackgroundOutput()
    stream = output.stream(os.fdopen(writer, "w", closefd=False))
    stream.write("first\n")
    assert output.finish(lambda: False)
    with pytest.raises(BrokenPipeError):
        stream.write("second\n")


def test_a_terminal_that_another_process_made_non_blocking_gets_everything(pipe: tuple[int, int]) -> None:
    """The mode belongs to the open file, which processes share; also as one of thousands of descriptors of a
    program that launches runs, where the machine permits so many.
    """
    reader, writer = pipe
    os.set_blocking(writer, False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    permitted = limits[1] == resource.RLIM_INFINITY or limits[1] >= 4 * SELECT_LIMIT
    if permitted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4 * SELECT_LIMIT), limits[1]))
    high = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 2 * SELECT_LIMIT if permitted else 0)
    output = BackgroundOutput()
    output.write(high, bytes(4 * PIPE_BYTES))
    assert read_all(reader, 4 * PIPE_BYTES) == bytes(4 * PIPE_BYTES)
    assert output.finish(lambda: False)
    os.close(high)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_stream_looks_like_the_one_that_it_stands_in_for(pipe: tuple[int, int]) -> None:
    """In what rich asks for; characters that it cannot encode do not raise. A stream without a descriptor
    stays.
    """
    reader, writer = pipe
    output = BackgroundOutput()
    plain = os.fdopen(writer, "w", encoding="latin-1", closefd=False)
    stream = output.stream(plain)
    assert (stream.fileno(), stream.isatty(), stream.encoding) == (writer, False, "latin-1")
    assert stream.writable()
    print("é ∞", file=stream, flush=True)
    assert output.finish(lambda: False)
    assert os.read(reader, 100) == "é ?\n".encode("latin-1")
    text = io.StringIO()
    assert output.stream(text) is text


def test_a_file_is_written_in_its_turn_and_takes_no_memory(pipe: tuple[int, int], tmp_path: Path) -> None:
    """Its part from a position to its end at the time of the call, between what came before and after it."""
    reader, writer = pipe
    path = tmp_path / "rank0.log"
    content = bytes(range(256)) * 20_000
    path.write_bytes(content)
    output = BackgroundOutput(max_bytes=1000)
    output.write(writer, b"before\n")
    output.write_file(writer, path, 1000)
    output.write_file(writer, tmp_path / "none", 0)
    output.write(writer, b"after\n")
    assert output.has_room
    with open(path, "ab") as file:
        file.write(b"by a process that was left behind")
    expected = b"before\n" + content[1000:] + b"after\n"
    assert read_all(reader, len(expected)) == expected
    assert output.finish(lambda: False)


def test_a_full_queue_has_no_room(pipe: tuple[int, int]) -> None:
    """Whoever has more keeps it; what is written all the same is not refused before the limit."""
    output = BackgroundOutput(max_bytes=8 * PIPE_BYTES)
    assert output.has_room
    output.write(pipe[1], b"x" * 4 * PIPE_BYTES)
    assert not output.has_room
    output.write(pipe[1], b"x")
    assert len(read_all(pipe[0], 4 * PIPE_BYTES + 1)) == 4 * PIPE_BYTES + 1
