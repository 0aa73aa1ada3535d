"""The faults of the campaign: every kind with what is done and what must follow, and how cases are drawn.

What must follow is what the documentation says. Pure data; `chaos.py` runs and judges it. A case is a fault
of a run: several happen one after another in one run, and each has to be recovered before the next.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = {
    "grpo": ("data", "generate", "reward", "score", "forward_backward", "optimizer", "vote", "checkpoint"),
    "sft": ("data", "forward_backward", "optimizer", "vote", "checkpoint"),
    "loop": ("data", "reward", "forward_backward", "optimizer", "vote", "checkpoint"),
}
"""In which something can happen, by job."""
SAVING_PHASES = ("vote", "checkpoint")
"""Are entered in the steps that save: every second one."""
OWN_STALLS = {
    "data": "data_stall", "generate": "generation_stall", "reward": "reward_stall",
    "checkpoint": "checkpoint_stall",
}  # fmt: skip
"""The causes of ranks that stand still, by phase."""
STUCK = frozenset({"interpreter_stuck"})
SIGNAL = frozenset({"signal"})
NOT_TOLD = "do not tell which"
"""Is said where the records of two ranks differ and none has done so before."""
HOLD_SECONDS = 2
"""How long a rank is held in its step, while something is done from outside."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault, and what must follow.

    Attributes:
        done: what is done, for the table.
        inject: of `--inject`; "" for what is done from outside, to a run with a rank that is held in a step.
        more: of the text of the injection.
        phases: in which it can happen; of the job if empty.
        jobs: in which it can happen.
        send, to: signals that are sent at once, and to whom.
        lasts_seconds: after so long SIGCONT is sent, or the room is given back.
        room: what has no more room: `disk`, `memory`, or `read-only` for a disk that cannot be written.
        between: what is done before the same command is given again.
        causes: the verdicts that are right; empty if nothing may be taken for a fault.
        stall: the cause of a rank that stands still in the phase is right, too.
        rank: whether the rank must be named; None if records may not tell, "any" if it is not one.
        event: of the journal, which must be found then.
        code: of the command; if it is not 0, the same command must go on and end with 0.
        may_change: the memory plan may change how a step is computed.
        last: it happens at the end of the run.
    """

    done: str
    inject: str = ""
    more: str = ""
    phases: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ("grpo", "sft", "loop")
    send: tuple[signal.Signals, ...] = ()
    to: str = "rank"
    lasts_seconds: float = 0.0
    room: str = ""
    between: str = ""
    causes: frozenset[str] = frozenset()
    stall: bool = False
    rank: bool | str | None = True
    event: str = ""
    code: int = 0
    may_change: bool = False
    last: bool = False

    def right_causes(self, phase: str) -> frozenset[str]:
        """Return the verdicts that are right in a phase."""
        return self.causes | ({OWN_STALLS.get(phase, "no_progress"), "no_progress"} if self.stall else set())


def _injected(name: str, done: str, *causes: str, **more: object) -> Kind:
    return Kind(done=done, inject=name, causes=frozenset(causes), **more)  # type: ignore[arg-type]


REJECTED = "checkpoint_rejected"
STOPPED, KILLED = 75, -signal.SIGKILL
KINDS: Mapping[str, Kind] = {
    "kill": _injected("kill", "SIGKILL to itself", "signal"),
    "exception": _injected("exception", "an exception", "exception"),
    "exit": _injected("exit", "`sys.exit(0)` in a step", "rank_exited_early", rank=None),
    "return": _injected(
        "return", "one rank leaves `train()` or the loop", "rank_exited_early", "collective_mismatch",
        "collective_missing_rank", phases=("data", "forward_backward"), rank=None,
    ),
    "mismatch-operation": _injected(
        "mismatch-operation", "all_gather in place of all_reduce", "collective_mismatch", rank=None
    ),
    "mismatch-shape": _injected(
        "mismatch-shape", "all_reduce of another size", "collective_mismatch", rank=None
    ),
    "skip": _injected(
        "skip", "an all_reduce is left out", "collective_mismatch", "collective_missing_rank", rank=None
    ),
    "hang": _injected("hang", "an endless sleep", stall=True),
    "lock": _injected("lock", "a lock that nobody releases", stall=True),
    "stop": _injected("stop", "SIGSTOP to itself", "interpreter_stuck"),
    "gil": _injected("gil", "a regular expression without end", "interpreter_stuck"),
    "slow": _injected("slow", "a sleep of 1.5 s", more=":seconds=1.5"),
    "slow-generation": _injected(
        "slow-generation", "each token takes 0.2 s longer", phases=("generate",), jobs=("grpo",)
    ),
    "oom": _injected("oom", "GPU memory runs out", "gpu_oom", may_change=True),
    "exit-hang": _injected(
        "exit-hang", "an exit handler without end", "no_progress", phases=("data",), last=True
    ),
    "rank-kill": Kind(done="SIGKILL to a rank", send=(signal.SIGKILL,), causes=SIGNAL),
    "rank-term": Kind(done="SIGTERM to a rank", send=(signal.SIGTERM,), causes=SIGNAL),
    "rank-segv": Kind(done="SIGSEGV to a rank", send=(signal.SIGSEGV,), causes=SIGNAL),
    "rank-stop": Kind(done="SIGSTOP to a rank", send=(signal.SIGSTOP,), causes=STUCK),
    "rank-pause": Kind(
        done="SIGSTOP to a rank, SIGCONT after 1 s", send=(signal.SIGSTOP,), lasts_seconds=1.0
    ),
    "ranks-kill": Kind(
        done="SIGKILL to all ranks at once", send=(signal.SIGKILL,), to="ranks", causes=SIGNAL, rank="any"
    ),
    "drain-kill": Kind(done="SIGKILL to the drain worker", send=(signal.SIGKILL,), to="drain worker"),
    "guardian-kill": Kind(done="SIGKILL to the guardian", send=(signal.SIGKILL,), to="guardian"),
    "forkserver-kill": Kind(
        done="SIGKILL to the forkserver, the parent of the ranks", send=(signal.SIGKILL,), to="forkserver",
        causes=SIGNAL, rank="any",
    ),
    "forkserver-pause": Kind(
        done="SIGSTOP to the forkserver, SIGCONT after 3 s", send=(signal.SIGSTOP,), to="forkserver",
        lasts_seconds=3.0,
    ),
    "supervisor-pause": Kind(
        done="SIGSTOP to the supervisor, SIGCONT after 4 s", send=(signal.SIGSTOP,), to="supervisor",
        lasts_seconds=4.0,
    ),
    "disk-full": Kind(done="the output directory is full for 4 s", room="disk", lasts_seconds=4.0),
    "disk-read-only": Kind(
        done="the output directory is read-only for 4 s", room="read-only", lasts_seconds=4.0
    ),
    "snapshots-full": Kind(done="the snapshot directory is full for 4 s", room="memory", lasts_seconds=4.0),
    "stop-term": Kind(
        done="SIGTERM to the supervisor", send=(signal.SIGTERM,), to="supervisor", code=STOPPED
    ),
    "stop-interrupt": Kind(
        done="SIGINT to the supervisor", send=(signal.SIGINT,), to="supervisor", code=STOPPED
    ),
    "stop-twice": Kind(
        done="SIGTERM to the supervisor, twice", send=(signal.SIGTERM, signal.SIGTERM), to="supervisor",
        code=STOPPED,
    ),
    "stop-command": Kind(done="`grpo-run stop`", to="command", code=STOPPED),
    "supervisor-kill": Kind(
        done="SIGKILL to the supervisor", send=(signal.SIGKILL,), to="supervisor", code=KILLED
    ),
    "all-kill": Kind(done="SIGKILL to all processes", send=(signal.SIGKILL,), to="all", code=KILLED),
    "memory-lost": Kind(
        done="SIGKILL to all processes, and snapshots are gone, as after a restart of the machine",
        send=(signal.SIGKILL,), to="all", between="memory", code=KILLED,
    ),
    "journal-torn": Kind(
        done="SIGKILL to the supervisor, and half a line at the end of the journal", send=(signal.SIGKILL,),
        to="supervisor", between="journal", code=KILLED,
    ),
    "truncated": Kind(
        done="SIGTERM, and the newest checkpoint is truncated", send=(signal.SIGTERM,), to="supervisor",
        between="truncate", event=REJECTED, code=STOPPED,
    ),
    "flipped": Kind(
        done="SIGTERM, and one bit of the newest checkpoint is flipped", send=(signal.SIGTERM,),
        to="supervisor", between="flip", event=REJECTED, code=STOPPED,
    ),
    "manifest-lost": Kind(
        done="SIGTERM, and the newest checkpoint has lost its manifest", send=(signal.SIGTERM,),
        to="supervisor", between="manifest", code=STOPPED,
    ),
}  # fmt: skip

MEMORY_PHASES = {
    "grpo": ("generate", "score", "forward", "backward", "optimizer"),
    "sft": ("forward", "backward", "optimizer"),
    "loop": ("forward", "backward", "optimizer"),
}
JOBS = ("loop", "grpo", "sft", "loop", "grpo", "loop")
"""Of the runs in turn."""
FAULTS = 12
"""Of one run: one of them ends the command, and the last may happen at its end."""
APART, FIRST = 4, 4
"""Steps between two faults, with a checkpoint every two, and the step of the first one."""
STEPS = FIRST + APART * (FAULTS + 1)
RUNS_WITH_OOM, FIRST_WITH_OOM = 4, 2
"""In one of so many runs memory may run out, after which its weights may be others: of each job in turn."""
ENDING = tuple(name for name, kind in KINDS.items() if kind.code)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of a run."""

    name: str
    """The run and the number of the fault in it, as `12.3`."""
    kind: str
    rank: int
    step: int
    phase: str

    @property
    def injection(self) -> str:
        """The canonical text of what happens in a rank: the fault, or a pause in which something is done."""
        kind = KINDS[self.kind]
        if not kind.inject:
            return f"slow@rank{self.rank}:step{self.step}:phase=forward_backward:seconds={HOLD_SECONDS}"
        from grpo_run.runtime.features.injections._injection import parse_injection

        return str(
            parse_injection(f"{kind.inject}@rank{self.rank}:step{self.step}:phase={self.phase}{kind.more}")
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some faults in one run of a job."""

    seed: int
    number: int
    job: str
    cases: tuple[Case, ...] = field(default=())


def draw(seed: int, number: int) -> Run:
    """Return a run of a campaign; the same one whatever other runs are drawn."""
    job = JOBS[number % len(JOBS)]
    dice = random.Random(f"{seed}/{number}")
    # each run ends one command, in an order without repetitions
    block, place = divmod(number, len(ENDING))
    ending = random.Random(f"{seed}/ending/{block}").sample(ENDING, len(ENDING))[place]
    possible = [
        name for name, kind in KINDS.items()
        if job in kind.jobs and not kind.code and not kind.last
        and (not kind.may_change or number % RUNS_WITH_OOM == FIRST_WITH_OOM)
    ]  # fmt: skip
    last = [name for name, kind in KINDS.items() if kind.last and dice.random() < 1 / 4]
    names = [ending, *dice.sample(possible, FAULTS - 1 - len(last))]
    dice.shuffle(names)
    # without room in memory saves go to the disk at once, for some time, where they raise if it is full
    places = [index for index, name in enumerate(names) if KINDS[name].room]
    memory_last = sorted((names[index] for index in places), key=lambda name: KINDS[name].room == "memory")
    for index, name in zip(places, memory_last, strict=True):
        names[index] = name
    cases = []
    for index, name in enumerate([*names, *last]):
        kind, step = KINDS[name], FIRST + APART * index + dice.randrange(2)
        phases = MEMORY_PHASES[job] if kind.may_change else kind.phases or PHASES[job]
        phase = dice.choice(phases) if kind.inject else "forward_backward"
        cases.append(
            Case(
                name=f"{number}.{index}", kind=name, rank=dice.randrange(2), phase=phase,
                step=step + step % 2 if phase in SAVING_PHASES else step,
            )
        )  # fmt: skip
    return Run(seed=seed, number=number, job=job, cases=tuple(cases))
