"""In a pipe or a file, `grpo-run launch` shows what torchrun shows: all ranks, byte for byte, each stream on
its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support import warm
from support.references import undisturbed
from support.runs import BIN, SCRIPTS, digest
from support.warm import QUIET

sys.path.insert(0, str(SCRIPTS))
import printing

DEADLINE_SECONDS = 120.0
OWN = re.compile(r"\d\d:\d\d:\d\d grpo-run: |.* torch/distributed/")
"""Lines of grpo-run and of torchrun on standard error."""
BY_NATURE = (
    (
        re.compile(r"[\[\]\w ]{0,40}:?\s{0,4}\d{1,3}%\|[^\[\r\n]{0,60}\[[^\]\r\n]*\]"),
        "",
        "states of a progress bar",
    ),
    (re.compile(r"\[W\d{4} [\d:.]+ "), "[W ", "times of warnings of torch"),
    (re.compile(r"'(train_\w+|step_time|\w*_per_second)': '[^']*'"), r"'\1': ", "durations"),
)
"""What differs between any two runs, what it is replaced by, and what it is."""


class Launched:
    """A launch with a pipe on each stream, and a thread that reads each."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        read: Sequence[Callable[[int], bytes]],
        merged: bool = False,
    ) -> None:
        self.content = [b"", b""]
        streams = [os.pipe()] * 2 if merged else [os.pipe(), os.pipe()]
        self.process = warm.start(
            command,
            cwd=folder,
            environment={**os.environ, **QUIET},
            stdout=streams[0][1],
            stderr=streams[1][1],
        )
        for writer in {writer for _, writer in streams}:
            os.close(writer)
        self._threads = [
            threading.Thread(target=self._read, args=(index, reader, take))
            for (index, (reader, _)), take in zip(enumerate(streams), read, strict=False)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int, reader: int, take: Callable[[int], bytes]) -> None:
        self.content[index] = take(reader)
        os.close(reader)

    def end(self) -> int:
        """Wait for the process and the readers."""
        try:
            code = self.process.wait(DEADLINE_SECONDS)
        finally:
            self.process.kill()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
        return code


def everything(reader: int) -> bytes:
    return b"".join(iter(lambda: os.read(reader, 1 << 20), b""))


def slowly(reader: int) -> bytes:
    """A reader that begins late and stops now and then."""
    parts = []
    while part := os.read(reader, 1 << 20):
        parts.append(part)
        if len(parts) % 40 == 1:
            time.sleep(0.1)
    return b"".join(parts)


def nothing(reader: int) -> bytes:
    """A reader that goes away, as `head -1` does."""
    return os.read(reader, 1)


def launch(folder: Path, *arguments: str, **options: object) -> Launched:
    command = [str(BIN / "grpo-run"), "launch", "--run-dir", "run", "--metrics-addr", "off", *arguments]
    return Launched(folder, command, **{"read": (everything, everything), **options})  # type: ignore[arg-type]


def lines_of(content: bytes) -> list[str]:
    """The lines, without those of the launcher, and without what differs by nature."""
    text = "\n".join(
        line for line in content.decode(errors="backslashreplace").split("\n") if not OWN.match(line)
    )
    for pattern, replacement, _ in BY_NATURE:
        text = pattern.sub(replacement, text)
    return [line for line in re.split(r"[\r\n]", text) if line.strip()]


def of_rank(rank: int, lines: Sequence[str]) -> Iterator[str]:
    """The lines that name a rank, in their order; the Trainer's logs are rank 0's."""
    for line in lines:
        if f"[{rank}]" in line or (rank == 0 and line.startswith("{'")):
            yield line


def test_a_trl_script_prints_and_trains_as_under_torchrun(tmp_path: Path) -> None:
    """Line by line on each stream, and the lines of a rank in their order. The weights are the same too, and
    those of the plain warm ranks with which other tests compare.
    """
    words = [
        str(SCRIPTS / "talkative.py"), "--output-dir", "out", "--max-steps", "12", "--save-steps", "4",
        "--logging-steps", "1",
    ]  # fmt: skip
    for folder in ("ours", "torchrun"):
        (tmp_path / folder).mkdir()
    expected = subprocess.run(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *words],
        cwd=tmp_path / "torchrun", env={**os.environ, **QUIET}, capture_output=True, stdin=subprocess.DEVNULL,
        timeout=DEADLINE_SECONDS, check=True,
    )  # fmt: skip
    ours = launch(tmp_path / "ours", "--nproc-per-node", "2", "--snapshot-every", "1", *words)
    assert ours.end() == 0, ours.content[1].decode(errors="replace")
    for name, theirs, mine in (
        ("stdout", expected.stdout, ours.content[0]),
        ("stderr", expected.stderr, ours.content[1]),
    ):
        wanted, found = lines_of(theirs), lines_of(mine)
        missing, more = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
        print(
            f"{name}: {len(wanted)} lines under torchrun, {len(found)} here; missing {missing}, more {more}"
        )
        assert wanted, "nothing is compared"
        assert (missing, more) == (Counter(), Counter()), name
        for rank in (0, 1):
            assert list(of_rank(rank, found)) == list(of_rank(rank, wanted)), (name, rank)
    assert b"3/3" in ours.content[1], "progress bars are shown"
    assert b"grpo-run: " not in ours.content[0], "our lines go to standard error"
    assert b"grpo-run: Finished" in ours.content[1]
    found = [digest(tmp_path / folder / "out") for folder in ("ours", "torchrun")]
    assert found == [undisturbed("sft_then_grpo.py", 12)] * 2


def test_nothing_is_lost_of_a_killed_rank_that_prints_faster_than_its_reader_reads(tmp_path: Path) -> None:
    """32 MB of any bytes in each of two attempts, a line of 20 MB among them, are read byte for byte."""
    run = launch(tmp_path, str(SCRIPTS / "printing.py"), "mass", read=(slowly, everything))
    assert run.end() == 0, run.content[1].decode(errors="replace")
    assert (tmp_path / "killed").exists()
    assert run.content[0] == printing.mass() * 2
    assert b"killed by SIGKILL" in run.content[1]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    """The rank's file has what it prints, and standard error says how the run has ended."""
    (tmp_path / "killed").touch()
    run = launch(tmp_path, str(SCRIPTS / "printing.py"), "mass", read=(nothing, everything))
    assert run.end() == 0, run.content[1].decode(errors="replace")
    assert (tmp_path / "run" / "attempts" / "000" / "rank0.log").read_bytes() == printing.mass()
    assert b"Finished" in run.content[1]


@pytest.mark.parametrize("merged", [True, pytest.param(False, marks=pytest.mark.full)])
def test_both_streams_in_one_pipe_keep_the_order_of_the_writes(tmp_path: Path, merged: bool) -> None:
    """As in the log of a Slurm job; in two pipes each has its own."""
    run = launch(
        tmp_path,
        str(SCRIPTS / "printing.py"),
        "turns",
        merged=merged,
        read=(everything, everything)[: 2 - merged],
    )
    assert run.end() == 0
    numbers = [str(number) for number in range(printing.TURNS)]
    printed = [lines_of(content) for content in run.content]
    assert printed == ([numbers, []] if merged else [numbers[::2], numbers[1::2]])
    with contextlib.suppress(FileNotFoundError):
        assert (tmp_path / "run" / "attempts" / "000" / "rank0.err").read_text().split() == numbers[1::2]
        assert not merged


@pytest.mark.full
@pytest.mark.parametrize("merged", [True, False])
def test_lines_are_labelled_with_their_rank_on_request(tmp_path: Path, merged: bool) -> None:
    """Whole lines, each on its stream and in the order of its rank; files have them as they were printed."""
    options = ("--label-ranks", "--nproc-per-node", "2")
    run = launch(
        tmp_path, *options, str(SCRIPTS / "printing.py"), "turns", merged=merged,
        read=(everything, everything)[: 2 - merged],
    )  # fmt: skip
    assert run.end() == 0
    numbers = [str(number) for number in range(printing.TURNS)]
    expected = [numbers, []] if merged else [numbers[::2], numbers[1::2]]
    for content, wanted in zip(run.content, expected, strict=True):
        lines = lines_of(content)
        for rank in (0, 1):
            label = f"[rank{rank}] "
            assert [one.removeprefix(label) for one in lines if one.startswith(label)] == wanted
        assert len(lines) == 2 * len(wanted)
    assert "[rank" not in (tmp_path / "run" / "attempts" / "000" / "rank0.log").read_text()
