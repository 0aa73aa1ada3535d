"""The hang matrix: a plain TRL script hangs at one place in one way, under the defaults; one row for each
cell.

A cell is a situation and a fault. Its latency runs from the time that the script wrote just before it hung to
the event of the incident, whose verdict is then on disk. `tests/fault/test_hang_matrix.py` runs the cells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from support import references
from support.runs import SCRIPTS, Run, digest, line_of

SCRIPT = "hangs.py"
STEPS = 16
BUSY_SECONDS = 75.0
"""How long a busy loop is watched: it must not be ended within this time."""
RUN_SECONDS = 110.0
"""Start, training and recovery of a run, on a machine that is used by others too."""
GONE_SECONDS = 10.0
WORKER_SECONDS = 75.0
EXIT_CHILD_SECONDS = 320.0


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A place of the script.

    Args:
        where: the script's `--where`.
        causes: acceptable where the interpreter still runs.
        ranks: on which the place is reached.
        arguments: further ones of the script.
        name: of the situation, if several have this place.
        in_worker: whether the code runs in a worker of a data loader, whose stack is not the rank's.
    """

    where: str
    causes: frozenset[str] = frozenset({"no_progress"})
    ranks: tuple[int, ...] = (1, 0)
    arguments: tuple[str, ...] = ()
    name: str = ""
    in_worker: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.where)

    @property
    def after_the_script(self) -> bool:
        """Whether the script has done its work, so that nothing is repeated."""
        return self.where == "exit-handler"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A way to hang.

    Args:
        how: the script's `--how`.
        seconds: the longest time in which it must be found; None for never.
        causes: acceptable beside those of the place.
        says: what the proof says that the rank waits for.
    """

    how: str
    seconds: float | None
    causes: frozenset[str] = frozenset()
    says: str = ""


def causes(*names: str) -> frozenset[str]:
    """Return the acceptable causes of a place."""
    return frozenset({"no_progress", *names})


SITUATIONS = (
    Situation(where="startup"),
    Situation(where="map", causes=causes("data_stall")),
    Situation(where="first", causes=causes("reward_stall")),
    Situation(where="callback"),
    Situation(where="save", causes=causes("checkpoint_stall")),
    Situation(where="evaluation", causes=causes("reward_stall")),
    Situation(where="reward", causes=causes("reward_stall")),
    Situation(where="data", causes=causes("data_stall")),
    Situation(where="generate", causes=causes("generation_stall")),
    Situation(where="save-model", causes=causes("checkpoint_stall"), ranks=(0,)),
    Situation(where="own-save", causes=causes("checkpoint_stall")),
    Situation(where="between", arguments=("--calls", "2")),
    Situation(where="thread"),
    Situation(where="exit-handler"),
    Situation(where="left-thread"),
    Situation(
        where="data",
        name="worker",
        causes=causes("data_stall"),
        arguments=("--settings", '{"dataloader_num_workers": 1}', "--fault-step", "1"),
        in_worker=True,
    ),
)
STUCK = frozenset({"interpreter_stuck"})
HANGS = (
    Hang(how="sleep", seconds=15.0, says="the end of a sleep"),
    Hang(how="lock", seconds=15.0, says="a lock that no running thread can release"),
    Hang(how="stop", seconds=30.0, causes=STUCK),
    Hang(how="regex", seconds=30.0, causes=STUCK),
    Hang(how="busy", seconds=None),
    Hang(how="queue", seconds=15.0, says="a queue that no running thread can feed"),
    Hang(how="child", seconds=75.0),
    Hang(how="join", seconds=15.0, says="a thread that cannot end"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix: on one rank, or on all if `rank` is None."""

    situation: Situation
    hang: Hang
    rank: int | None
    ranks: int = 2

    def __str__(self) -> str:
        who = "all" if self.rank is None else f"rank{self.rank}"
        return f"{self.situation.name}-{self.hang.how}-{who}" + (
            f"-of-{self.ranks}" if self.ranks != 2 else ""
        )

    @property
    def limit_seconds(self) -> float | None:
        """The longest time in which the hang must be found; None if it must not be ended.

        A rank polls the workers of its data loader with a time limit, so its own wait has an end and nothing
        can be proved. A worker whose interpreter is held by one thread is as busy as one that tokenizes.
        After the last line, a child that lives may be a logger's upload, which gets five minutes.
        """
        if self.situation.after_the_script and self.hang.how == "child":
            return EXIT_CHILD_SECONDS
        if not self.situation.in_worker or self.hang.seconds is None:
            return self.hang.seconds
        return None if self.hang.how == "regex" else WORKER_SECONDS

    @property
    def causes(self) -> frozenset[str]:
        """The acceptable causes; the interpreter that does not run in a worker is not the rank's."""
        ours = self.hang.causes if not self.situation.in_worker else frozenset()
        return ours or self.situation.causes

    @property
    def culprits(self) -> list[int]:
        """The ranks that must be named."""
        return list(range(self.ranks)) if self.rank is None else [self.rank]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a cell; `wrong` names what is not as it must be, `seconds` is None if nothing was
    found.
    """

    situation: str
    how: str
    rank: int | None
    ranks: int
    seconds: float | None
    sentence: str
    wrong: tuple[str, ...]


def cell(situation: str, how: str, rank: int | None = 1, *, ranks: int = 2) -> Cell:
    """Return the cell of these names."""
    (place,) = (one for one in SITUATIONS if one.name == situation)
    (hang,) = (one for one in HANGS if one.how == how)
    return Cell(situation=place, hang=hang, rank=rank, ranks=ranks)


def fault_line(how: str, script: str = SCRIPT) -> tuple[str, int]:
    """Return the file and the number of the line that hangs in this way."""
    return script, line_of(script, f"FAULT: {how}")


def words(one: Cell | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return the script and its arguments; without a cell, those of the undisturbed run but for the output
    directory.
    """
    found = [str(SCRIPTS / SCRIPT), "--max-steps", str(STEPS), "--save-steps", "4", *arguments]
    if one is None:
        return found
    fault = ["--where", one.situation.where, "--how", one.hang.how]
    if one.rank is not None:
        fault += ["--fault-rank", str(one.rank)]
    return [*found, *one.situation.arguments, *fault, "--output-dir", "ours"]


def check(one: Cell, run: Run) -> Row:
    """Run a cell and return its row.

    Args:
        run: not started, with the arguments of `launch_words`.
    """
    expected = references.undisturbed_command(words(None, one.situation.arguments), ranks=one.ranks)
    run.start()
    if one.limit_seconds is None:
        return _watch_busy_loop(one, run)
    wrong = []
    try:
        code = run.wait(RUN_SECONDS + one.limit_seconds + 60.0)
    except AssertionError as error:
        code = None
        wrong.append(f"the run did not end: {str(error).splitlines()[0]}")
    began = _began(run)
    if began is None:
        return _row(one, None, "", [f"the fault did not happen; exit code {code}"])
    if code not in (0, None):
        wrong.append(f"exit code {code}")
    wrong += _left_behind(run.folder)
    incidents = run.events("incident")
    if not incidents:
        return _row(one, None, "", [*wrong, "no incident"])
    if len(incidents) > 1:
        wrong.append(f"{len(incidents)} incidents: {[event['sentence'] for event in incidents[1:]]}")
    verdict = run.verdicts()[0]
    wrong += _wrong_in(verdict, one)
    seconds = incidents[0]["time"] - began
    if seconds > one.limit_seconds:
        wrong.append(f"{seconds:.1f} s, more than {one.limit_seconds:.0f} s")
    if code == 0 and digest(run.folder / "ours") != expected:
        wrong.append("the weights differ from the undisturbed run's")
    if code == 0 and run.status()["attempts"] != (1 if one.situation.after_the_script else 2):
        wrong.append(f"{run.status()['attempts']} attempts")
    return _row(one, seconds, verdict["sentence"], wrong)


def launch_words(one: Cell) -> list[str]:
    """Return the arguments of `grpo-run launch`: the defaults."""
    return ["--nproc-per-node", str(one.ranks), *words(one)]


def _wrong_in(verdict: dict[str, Any], one: Cell) -> list[str]:
    """Compare cause, rank and line of a verdict with the fault."""
    wrong = []
    if verdict["cause"] not in one.causes:
        wrong.append(f"cause {verdict['cause']}, not {' or '.join(sorted(one.causes))}")
    if sorted(verdict["culprits"]) != one.culprits:
        wrong.append(f"culprits {verdict['culprits']}, not {one.culprits}")
    if one.situation.where == "callback" and one.hang.says:
        waiters = [rank for rank in range(one.ranks) if rank not in one.culprits]
        found = verdict["confidence"], verdict["waiters"], one.hang.says in verdict["sentence"]
        if found != ("proved", waiters, True):
            wrong.append(f"{found}, not proved, with waiters {waiters} and {one.hang.says!r}")
    lines = [fault_line(one.hang.how)]
    if one.situation.where == "thread":
        # where the main thread starts it and waits for it
        lines += [fault_line(name, "places.py") for name in ("thread-start", "thread")]
    for rank in () if one.situation.in_worker else one.culprits:
        location = verdict["locations"].get(str(rank)) or {"file": "none", "line": 0}
        found = (Path(location["file"]).name, location["line"])
        # the main thread waits inside the interpreter for another thread, whose line is in the sentence
        named = any(f"{file}:{line} " in verdict["sentence"] for file, line in lines)
        if found not in lines and not (one.situation.where == "left-thread" and named):
            wrong.append(f"rank {rank} at line {found}, not one of {lines}")
    return wrong


def _watch_busy_loop(one: Cell, run: Run) -> Row:
    """A busy loop is not ended, but it is said who is waited for and until when."""
    deadline = time.monotonic() + RUN_SECONDS
    while (began := _began(run)) is None:
        if time.monotonic() > deadline or run.process.poll() is not None:
            return _row(one, None, "", [f"the fault did not happen: {run.tail(500)}"])
        time.sleep(0.1)
    while time.time() < began + BUSY_SECONDS:
        if run.events("incident") or run.process.poll() is not None:
            break
        time.sleep(0.5)
    incidents = run.events("incident")
    status = run.status()
    wrong = [f"incident: {event['sentence']}" for event in incidents]
    waiting = status["waiting"] or {"rank": None, "deadline_seconds": None}
    if waiting["rank"] not in one.culprits or not waiting["deadline_seconds"]:
        wrong.append(f"status does not say who is waited for until when: {waiting}")
    run.close()
    wrong += _left_behind(run.folder)
    return _row(one, None, str(status["sentence"]), wrong)


def _began(run: Run) -> float | None:
    """Return when the hang began, as the script wrote it; None if it has not."""
    texts = [path.read_text() for path in run.folder.glob("fault-*.json")]
    return min((json.loads(text)["time"] for text in texts if text), default=None)


def _left_behind(folder: Path) -> list[str]:
    """Name processes in the run's working directory that outlive it."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := _processes_in(folder):
        if time.monotonic() > deadline:
            return [f"left behind: {left}"]
        time.sleep(0.1)
    return []


def _processes_in(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:60]}")
        except (psutil.Error, OSError):  # it has exited, or it is another user's
            continue
    return found


def _row(one: Cell, seconds: float | None, sentence: str, wrong: Sequence[str]) -> Row:
    return Row(
        situation=one.situation.name,
        how=one.hang.how,
        rank=one.rank,
        ranks=one.ranks,
        seconds=seconds,
        sentence=sentence,
        wrong=tuple(wrong),
    )
