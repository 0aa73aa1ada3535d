"""Ranks that have failed or hang, and the verdict on them: the shell of transcripts."""

from __future__ import annotations

import re
import signal
import sysconfig
from dataclasses import replace
from typing import Any

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.diagnosis import _hangs as hangs
from grpo_run.watchdog.diagnosis._host_oom import diagnose_host_oom
from grpo_run.watchdog.diagnosis._rewards import CALLER_FILE, raised_reward
from grpo_run.watchdog.diagnosis.exits import diagnose_alarm, diagnose_early_exit, diagnose_exits, is_victim
from grpo_run.watchdog.evidence.stacks import Frame, Stack
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory
from grpo_run.watchdog.observation import (
    Alarm,
    Exit,
    OpenPhase,
    Phase,
    ProcessEnd,
    RaisedError,
    RankError,
    RankState,
    Slot,
)
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.verdict import Location, Verdict
from grpo_run.watchdog.waits.sentences import ANOTHER_THREAD
from support.builders.watchdog.slots import make_slot

PEER_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4182"
)
RUNTIME = "builtins.RuntimeError,builtins.Exception"
BACKWARD = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    loss.backward()\n'
SCRIPT = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 12, in collect\n    torch.empty(n)\n'
)
KINDS: dict[str, dict[str, str]] = {
    "raised": {"type": "ZeroDivisionError", "message": "division by zero"},
    "peer": {"type": "RuntimeError", "message": PEER_GONE},
    "gpu": {
        "chain": f"torch.OutOfMemoryError,{RUNTIME}", "phases": "forward_backward", "traceback": BACKWARD,
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
                   " of which 512.00 MiB is free.",
    },
    "nccl": {
        "chain": f"torch.distributed.DistBackendError,torch.distributed.DistError,{RUNTIME}",
        "phases": "forward_backward", "traceback": BACKWARD, "wall_time": "1001",
        "message": "NCCL error in: NCCLUtils.hpp:77, unhandled cuda error, NCCL version 2.21.5\n"
                   "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                   "Cuda failure 2 'out of memory'",
    },
    "own-gpu": {"chain": f"torch.OutOfMemoryError,{RUNTIME}", "message": "CUDA out of memory. Tried to"
                " allocate 2.00 GiB", "location": "/home/u/train.py:12:collect", "traceback": SCRIPT},
    "own-host": {"chain": "builtins.MemoryError,builtins.Exception", "message": "",
                 "location": "/home/u/train.py:12:collect", "traceback": SCRIPT},
}  # fmt: skip
"""What a rank may have raised."""
WRAPPERS = {"wrapper": "called_in_rank", "outer-wrapper": "marked_async"}
MEBIBYTE = 1 << 20
LIMIT = LimitUse(
    name="the memory cgroup /job", limit_bytes=700 * MEBIBYTE, usage_bytes=690 * MEBIBYTE,
    working_set_bytes=660 * MEBIBYTE,
)  # fmt: skip
SAMPLE = HostSample(
    at=1000.0,
    limits=(LIMIT,),
    ranks={1: ProcessMemory(anonymous_bytes=310 * MEBIBYTE, file_bytes=0, shared_bytes=0)},
)


def phases_of(text: str) -> tuple[Phase, ...]:
    """The phases with these names."""
    return tuple(Phase[name] for name in text.split(",") if name)


def place_of(text: str) -> tuple[str, int, str]:
    """The place `file:line:function`."""
    file, line, function = text.rsplit(":", 2)
    return file, int(line), function


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks `0,1`."""
    return tuple(int(rank) for rank in text.split(",") if rank)


class DiagnosisShell:
    """Failed ranks and their slots, or stacks; each verdict begins again."""

    def __init__(self) -> None:
        self.exits: list[Exit] = []
        self.slots: dict[int, Slot | None] = {}
        self.stacks: dict[int, tuple[Stack, ...]] = {}
        self.verdict = Verdict(cause=Cause.unknown, step=0, sentence="", signature="")

    def slot(self, rank: str, *words: str, phases: str = "", callback: str = "", **changes: str) -> None:
        """The slot of a rank, at step 7 in the phase `generate` if nothing else is given.

        Args:
            words: `unreadable`, or `outside` phases.
        """
        given: dict[str, Any] = {name: int(value) for name, value in changes.items() if name != "state"}
        if "state" in changes:
            given["state"] = RankState[changes["state"]]
        if phases or "outside" in words:
            opened = phases_of(phases)
            given["phases"] = tuple(
                OpenPhase(
                    phase=phase, since_seconds=8.0 + i, callback=callback if phase is Phase.callback else ""
                )
                for i, phase in enumerate(opened)
            )
        self.slots[int(rank)] = None if "unreadable" in words else make_slot(int(rank), **given)

    def exit(self, rank: str, *words: str, code: str = "1", **options: str) -> str | None:
        """A rank has exited, after those before.

        Args:
            words: what it raised (one of `KINDS`), `completed`, or `victim?` to ask whether it is one.
            options: `signal`; `forkserver`, how that ended; `order`; all others change what it raised.
        """
        kind = next((word for word in words if word in KINDS), "raised" if "type" in options else "")
        number = options.pop("signal", "")
        end = options.pop("forkserver", "")
        order = int(options.pop("order", len(self.exits)))
        exit = Exit(
            rank=int(rank), pid=100 + int(rank), order=order, completed="completed" in words,
            exit_code=None if number else int(code), signal=self._signal(number) if number else None,
            error=self._error(KINDS[kind] | options) if kind else None,
            forkserver=ProcessEnd(
                exit_code=None if end.startswith("SIG") else int(end),
                signal=self._signal(end) if end.startswith("SIG") else None,
            ) if end else None,
        )  # fmt: skip
        self.exits.append(exit)
        return str(is_victim(exit)) if "victim?" in words else None

    def diagnose(self, best: str = "1,7", free: str = "") -> str:
        """The verdict on the ranks that have exited."""
        first, second = ranks_of(best)
        self._fill_slots()
        return self._say(
            diagnose_exits(
                self.exits, self.slots, best_position=(first, second),
                shared_memory_free_bytes=int(free) if free else None,
            )
        )  # fmt: skip

    def place_only(self) -> str:
        """Where the verdict on the ranks that have exited says that they were, without the phase."""
        return self.diagnose().splitlines()[1].partition(" (")[0]

    def stall_sentence(self, **options: str) -> str:
        """Only the sentence of the verdict on a stall."""
        return self.stall(**options).splitlines()[1]

    def early(self) -> str:
        """The verdict on ranks that left with code 0, and on others that failed."""
        self._fill_slots()
        left = [one for one in self.exits if one.exit_code == 0]
        return self._say(
            diagnose_early_exit(left, [one for one in self.exits if one not in left], self.slots)
        )

    def alarm(self) -> str:
        """The verdict on an attempt that an alarm has ended."""
        self._fill_slots()
        return self._say(diagnose_alarm(self.exits, self.slots))

    def host(self, killed: str = "", helper: str = "", risen: str = "yes") -> str:
        """The verdict if the kernel has killed these ranks, or a helper, for lack of memory."""
        self._fill_slots()
        kills = KernelKills(
            ranks=frozenset(ranks_of(killed)), helper_killed=bool(helper), before=2, now=3, sample=SAMPLE,
            reached=LIMIT, sample_age_seconds=0.3,
        )  # fmt: skip
        return self._say(
            diagnose_host_oom(
                self.exits, self.slots, kills if risen == "yes" else KernelKills(), best_position=(1, 7)
            )
        )

    def stack(self, rank: str, *calls: str) -> None:
        """One more thread of a rank: its calls, innermost first, as `file:line:function`.

        A call of which only the line is given is in `/home/user/train.py:reward`; `lib/` is Python's library,
        one of `WRAPPERS` our call of reward functions. `beside` says that it is not the main thread.
        """
        frames = tuple(
            Frame(*place_of(re.sub("^lib/", f"{sysconfig.get_path('stdlib')}/", call)))
            if ":" in call
            else Frame(CALLER_FILE, 1, WRAPPERS[call])
            if call in WRAPPERS
            else Frame("/home/user/train.py", int(call), "reward")
            for call in calls
            if call != "beside"
        )
        one = Stack("0x1", frames, "beside" not in calls)
        self.stacks[int(rank)] = (*self.stacks.get(int(rank), ()), one)

    def deadlock(self, culprits: str = "1", waiters: str = "0", cause: str = "", **lines: str) -> str:
        """The verdict on a deadlock of ranks 0 to 2, in which rank 1 is wrong and rank 0 waits.

        Args:
            lines: `at0` and `at1`, where the records say that they are.
        """
        lines = {"at0": "/home/user/train.py:88:main", "at1": "/home/user/train.py:12:reward"} | lines
        self._two_ranks()
        found = Deadlock(
            cause=Cause[cause or "collective_mismatch"],
            culprits=ranks_of(culprits), waiters=ranks_of(waiters),
            at=dict.fromkeys(range(3)), mismatch="all_reduce against all_gather", sentence="Deadlocked.",
            locations={
                rank: Location(file=file, line=line, function=function)
                for rank in (0, 1) if lines[f"at{rank}"]
                for file, line, function in [place_of(lines[f"at{rank}"])]
            },
        )  # fmt: skip
        return self._say(hangs.diagnose_deadlock(found, self.slots, self.stacks))

    def stall(
        self, *words: str, culprits: str = "1", waiters: str = "0", cause: str = "reward_stall",
        phase: str = "reward", sentence: str = "Rank 1 has hung.", alone: str = "",
    ) -> str:  # fmt: skip
        """The verdict on a stall of two ranks.

        Args:
            words: `proved`, `uninterruptible`, `goes-on`.
            alone: ranks that may be the only culprit.
        """
        self._two_ranks()
        found = Stall(
            cause=Cause[cause], culprits=ranks_of(culprits), waiters=ranks_of(waiters),
            phase=Phase[phase] if phase else None, deadline_seconds=8.0, waited_seconds=9.0,
            sentence=sentence.replace("another-thread", ANOTHER_THREAD),
            confidence="proved" if "proved" in words else "deadline",
            uninterruptible="uninterruptible" in words, goes_on="goes-on" in words,
        )  # fmt: skip
        one = replace(found, culprits=(1,), waiters=(0,), sentence="Rank 1 alone.")
        found = replace(found, alone=dict.fromkeys(ranks_of(alone), one))
        return self._say(hangs.diagnose_stall(found, self.slots, self.stacks))

    def raised_in(self, phase: str, kind: str, bases: str, caller: str = CALLER_FILE) -> str:
        """The reward function that has raised an exception of this kind in a phase."""
        traceback = (
            f'Traceback (most recent call last):\n  File "{caller}", line 9, in called_in_rank\n    f()\n'
            '  File "/me/train.py", line 3, in judge\n    wait()\n'
            f'  File "/lib/futures.py", line 3, in wait\n{kind}: 6 (of 8) futures unfinished\n'
        )
        error = self._error({"type": kind, "message": "", "bases": bases, "traceback": traceback})
        return str(raised_reward(error, phase))

    def slow_stop(self) -> str:
        """The verdict on ranks that did not stop in 30 s."""
        self._two_ranks()
        return self._say(hangs.diagnose_slow_stop(30.0, self.slots, self.stacks))

    def place(self) -> str:
        """Add where the other ranks were, by their stacks, to the last verdict."""
        placed = hangs.add_locations(self.verdict, self.stacks)
        self.stacks = {}
        return self._lines(placed)

    def caused_by_collectives(self) -> str:
        """Whether collectives may have caused these exits."""
        exits, self.exits = self.exits, []
        return str(hangs.caused_by_collectives(exits))

    def _error(self, told: dict[str, str]) -> RankError:
        chain = tuple(
            RaisedError(
                types=tuple(types.split(",")), message=told["message"],
                phases=phases_of(told.get("in", "")) or None,
            )
            for types in told.get("chain", "").split("|") if types
        )  # fmt: skip
        alarm = None
        if "alarm" in told:
            alarm = Alarm(
                cause=told["alarm"], step=7, sentence="It fell.", signature=f"{told['alarm']}:step7",
                advice=("Look at it.",),
            )  # fmt: skip
        location = told.get("location", "/home/user/train.py:12:reward")
        bases = told.get("bases", ",".join(chain[0].types) if chain else "")
        return RankError(
            type=told.get("type") or (chain[0].types[0].rpartition(".")[2] if chain else "RuntimeError"),
            message=told["message"].replace("\\n", "\n").replace("\\t", "\t"),
            traceback=told.get("traceback", "Traceback (most recent call last): ..."),
            location=place_of(location) if location else None, wall_time=float(told.get("wall_time", 1000.0)),
            phases=phases_of(told["phases"]) if told.get("phases", "-") != "-" else None,
            callback=told.get("callback", ""), bases=tuple(filter(None, bases.split(","))), chain=chain,
            root=told.get("root", ""), alarm=alarm,
        )  # fmt: skip

    @staticmethod
    def _signal(name: str) -> int:
        return int(signal.Signals[name]) if name.startswith("SIG") else int(name)

    def _fill_slots(self) -> None:
        if not self.slots:
            self.slots = {rank: make_slot(rank) for rank in range(max(one.rank for one in self.exits) + 1)}

    def _two_ranks(self) -> None:
        if not self.slots:
            self.slot("0")
            self.slot("1", step="6", phases="reward")
            self.slot("2", "unreadable")

    def _say(self, verdict: Verdict | None) -> str:
        self.exits, self.slots, self.stacks = [], {}, {}
        if verdict is None:
            return "no verdict"
        self.verdict = verdict
        facts = [f"phase {verdict.phase}"]
        facts += ["deterministic"] * verdict.deterministic + ["starting"] * verdict.starting
        facts += ["not counted"] * (not verdict.counted) + ["uninterruptible"] * verdict.uninterruptible
        facts += [f"from {verdict.origin}"] * (str(verdict.origin) != "code")
        shortage = verdict.as_json()["shortage"]
        known = [f"waiting {verdict.waiters}", verdict.confidence, f"step {verdict.step}", *facts]
        lines = [
            f"{verdict.cause} by {verdict.culprits}, {', '.join(known)}",
            verdict.sentence, verdict.signature, verdict.mismatch, self._lines(verdict),
            verdict.final, *(f"advice: {line}" for line in verdict.advice),
            f"repeats {verdict.repeat_key}" if verdict.repeat_key else "",
            f"reward {verdict.failed_reward}" if verdict.failed_reward else "",
            f"alarm {verdict.alarm.cause}" if verdict.alarm else "",
            f"traceback {verdict.traceback.splitlines()[0]}" if verdict.traceback else "",
            f"shortage {({name: value for name, value in shortage.items() if value})}" if shortage else "",
        ]  # fmt: skip
        return "\n".join(filter(None, lines))

    @staticmethod
    def _lines(verdict: Verdict) -> str:
        others = (
            f"{rank}: {place.file}:{place.line} {place.function}" for rank, place in verdict.locations.items()
        )
        at = [f"at {verdict.location.file}:{verdict.location.line} {verdict.location.function}"
              ] if verdict.location else []  # fmt: skip
        return "; ".join([*at, *others])
