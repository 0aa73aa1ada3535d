"""The threads of a rank and of its descendants, and what two looks at them prove: the shell of transcripts.

A thread is a kind of wait: `futex`, `timed`, `timed:SECONDS` or `poll:SECONDS`, `pipe`, `accept`, `child` or
`child:PID`, `sleep:SECONDS` (until then), `stopped`, `ended`, `unknown`. `/R` after it is another state than
asleep, and `@NAME` a name. The first thread of a process is its main thread; the others have the following
numbers. The rank is process 100.
"""

from __future__ import annotations

import math
import signal
import struct
from dataclasses import replace

from grpo_run.watchdog.waits.looks import UNKNOWN, Process, RankLook, Wait, WaitingThread, WaitKind
from grpo_run.watchdog.waits.proof import StuckRank, prove_stuck
from grpo_run.watchdog.waits.sentences import describe_stuck, name_lock
from grpo_run.watchdog.waits.system_calls import decode_wait

RANK = 100
STATES = {"stopped": "T", "ended": "Z"}
MEMORY = {0x7F0000001000: struct.pack("<qq", 1234, 500_000_000)}


def wait_of(word: str) -> Wait:
    """The wait of this name."""
    name, _, amount = word.partition(":")
    if name in ("timed", "poll"):
        call, seconds = ("epoll_wait", float(amount)) if amount else ("futex", math.nan)
        call = "poll" if name == "poll" else call
        return Wait(kind=WaitKind.timed, call=call, timeout_seconds=seconds)
    if name == "child":
        return Wait(kind=WaitKind.child, call="wait4", child=int(amount or 0))
    if name == "sleep":
        return Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=float(amount))
    if name == "unknown":
        return UNKNOWN
    calls = {
        "pipe": ("descriptors", "epoll_wait"),
        "accept": ("accept", "accept4"),
        "futex": ("futex", "futex"),
    }
    kind, call = calls.get(name, (name, ""))
    return Wait(kind=WaitKind[kind], call=call)


def thread_of(tid: int, word: str) -> WaitingThread:
    """The thread that this word describes."""
    word, _, name = word.partition("@")
    word, _, state = word.partition("/")
    return WaitingThread(
        tid=tid, name=name or "python", state=state or STATES.get(word, "S"), switches=7, wait=wait_of(word)
    )


class WaitShell:
    """A rank, and looks at it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin again."""
        self.look = RankLook(pid=RANK, processes={}, idle_threads=frozenset())
        self.before: RankLook | None = None

    def process(
        self,
        pid: str,
        *threads: str,
        parent: str = "100",
        handles: str = "",
        timers: str = "",
        helper: str = "",
    ) -> None:
        """A process with these threads; `unreadable` if they are not known.

        Args:
            handles: signals that it handles, by name or number.
            timers, helper: not empty for one that has timers, or is a helper of grpo-run or of Python.
        """
        number = int(pid)
        caught = frozenset(
            int(one) if one.isdigit() else int(signal.Signals[f"SIG{one}"])
            for one in handles.split(",")
            if one
        )
        one = Process(
            pid=number, parent=1 if number == RANK else int(parent), caught_signals=caught,
            has_timers=bool(timers), helper=bool(helper),
            threads=None if "unreadable" in threads
            else tuple(thread_of(number + i, word) for i, word in enumerate(threads)),
        )  # fmt: skip
        self.look = replace(self.look, processes={**self.look.processes, number: one})

    def idle(self, *threads: str) -> None:
        """Threads that the rank has published as idle."""
        self.look = replace(self.look, idle_threads=frozenset(map(int, threads)))

    def seen(self) -> None:
        """The first look; what follows happens before the second."""
        self.before = self.look

    def runs(self, pid: str, number: str) -> None:
        """A thread of a process is scheduled."""
        one = self.look.processes[int(pid)]
        moved = tuple(
            replace(thread, switches=thread.switches + (thread.tid == int(number)))
            for thread in one.threads or ()
        )
        self.look = replace(
            self.look, processes={**self.look.processes, int(pid): replace(one, threads=moved)}
        )

    def proof(self) -> str:
        """What two looks prove."""
        found = prove_stuck(self.before or self.look, self.look)
        if found is None:
            return "nothing"
        until = "for ever" if math.isinf(found.until_seconds) else f"until {found.until_seconds:g} s"
        return f"stuck in {found.wait.kind.name} {until}{', by a stop' * found.by_stop}"

    def say(self, *words: str, now: str = "0") -> str:
        """The sentence about stuck ranks, given as `RANK:WAIT`; `exiting` after their last line."""
        waits = {
            int(word.partition(":")[0]): wait_of(word.partition(":")[2]) for word in words if ":" in word
        }
        stuck = {
            rank: StuckRank(
                wait=wait, by_stop=False,
                until_seconds=wait.until_seconds if wait.kind is WaitKind.sleep else math.inf,
            )
            for rank, wait in waits.items()
        }  # fmt: skip
        return describe_stuck(stuck, now=float(now), exiting="exiting" in words)

    def lock(self, *calls: str) -> str:
        """What these calls around a futex wait for, innermost first, as `FILE:FUNCTION`."""
        return name_lock([(file, function) for file, _, function in (call.rpartition(":") for call in calls)])

    def call(self, number: str, *arguments: str, machine: str = "x86_64", stack: str = "") -> str:
        """The wait of a thread in this system call; `AT` is an address at which a time of 1234.5 s is."""
        given = [0x7F0000001000 if one == "AT" else int(one) for one in arguments]
        words = " ".join(hex(value & (1 << 64) - 1) for value in [*given, *[0] * (6 - len(given))])
        return self.line(f"{number} {words} {stack or '0x7ffe97b3a3b8 0x7f3c5fd0f117'}", machine)

    def line(self, text: str, machine: str = "x86_64") -> str:
        """The wait that the kernel's line about a thread means."""

        def read_memory(address: int, size_bytes: int) -> bytes | None:
            content = MEMORY.get(address)
            return content[:size_bytes] if content is not None else None

        found = decode_wait(text, machine, read_memory)
        facts = (
            f"{name} {value:g}"
            for name in ("timeout_seconds", "until_seconds", "child")
            if math.isfinite(value := getattr(found, name)) and (value or name != "child")
        )
        return " ".join([found.kind.name, found.call, *facts])
