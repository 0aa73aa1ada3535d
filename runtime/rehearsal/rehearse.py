"""A rehearsal: the undisturbed job twice, then the drills, as long as the time lasts.

Every run has a folder of its own below a work directory that the caller makes and removes, with its run
directory, its output directories and its output; snapshots have a directory beside those of real runs. Called
by `cli/rehearse.py`; judges nothing itself (`judgement.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.rehearsal import Rehearsal, Span, listing
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.processes.starting import become_subreaper
from grpo_run.runtime.rehearsal import children, judgement
from grpo_run.runtime.rehearsal._seen import Seen, read_traces, weights_of
from grpo_run.runtime.rehearsal.drills import Drill, Outside
from grpo_run.runtime.rehearsal.judgement import Row
from grpo_run.runtime.upstream.tracker_names import SWITCHED_OFF
from grpo_run.watchdog.processes import descendants, read_processes
from grpo_run.watchdog.text import is_of_agent

HELD = b'"fault_injected"'
"""In the journal once a rank is held."""
SMALL_DIRECTORY = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
"""In a mount namespace of its own, which ends with the run."""
MARGIN = 1.5
"""A drill takes at least so many times as long as the undisturbed job; a shorter rest of the time is not
begun.
"""
PATIENCE, PATIENCE_SECONDS = 4.0, 60.0
"""A command that takes so many times as long as the undisturbed job, and so much longer, is ended: some
failures of a script are tried again for minutes.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that is rehearsed.

    Attributes:
        options: of the launch, without those that the rehearsal sets.
        script: the script and its arguments, with `-m` before a module.
        snapshots: a directory for snapshots; None if the job has none.
        free_server: address of a rollout server that is not the job's and that no run uses; "" for none.
    """

    options: Sequence[str]
    script: Sequence[str]
    snapshots: Path | None
    free_server: str


class RehearsalRuns:
    """Runs a rehearsal.

    Args:
        work: an empty directory.
        seconds: how long it may take in all.
        say: shows one line of progress.
    """

    def __init__(self, job: Job, *, work: Path, seconds: float, say: Callable[[str], None]) -> None:
        self._job, self._work, self._say = job, work, say
        self._deadline = time.monotonic() + seconds
        self._ranks = 1
        self._longest_seconds, self._tool_seconds = seconds, 0.0
        self._span = Span.of()

    def rows(self, drills: Sequence[Drill]) -> Iterator[Row]:
        """Run everything, and yield what is said of it.

        Raises:
            UsageError: the command of the job is refused, or it would change a server that is not its own.
        """
        become_subreaper()
        first = self._run("undisturbed")
        self._longest_seconds = PATIENCE * first.seconds + PATIENCE_SECONDS
        self._tool_seconds = first.tool_seconds
        self._span = next((Span(**fact) for fact in self._facts("span.json")), self._span)
        self._say(f"a run takes {first.seconds:.0f} s; drills for which --for is too short are left out")
        if first.codes == (2,):
            raise UsageError(self._last_line("undisturbed"))
        second = self._run("repeated") if self._fits(first.seconds) and first.codes == (0,) else None
        usual = first.seconds if second is None else min(first.seconds, second.seconds)  # one may compile
        row, unrepeatable = judgement.judge_job(first, second, self._span.steps)
        yield row
        runnable = first.codes == (0,) and bool(first.weights)
        for drill in drills:
            step = self._span.rollout_step if drill.tool_hangs else self._span.fault_step
            drill = replace(drill, done=f"in step {step}: {drill.done}")
            if not runnable:
                yield judgement.not_run(drill, "the undisturbed job failed")
            elif lacks := self._lacks(drill, first):
                yield judgement.not_run(drill, lacks, applies=False)
            elif not self._fits(usual):
                yield judgement.not_run(drill, "the time was too short (--for)")
            else:
                seen = self._run(drill.name, drill)
                if drill.tool_hangs and not (self._work / drill.name / "hung").exists():
                    yield judgement.not_run(drill, "the model has called no tool", applies=False)
                else:
                    yield judgement.judge(drill, seen, first, unrepeatable)
        yield from self._room()
        yield judgement.judge_untouched(list(self._changes()))

    def _fits(self, seconds: float) -> bool:
        return time.monotonic() + MARGIN * seconds < self._deadline

    def _lacks(self, drill: Drill, first: Seen) -> str:
        """Return why a drill says nothing of this job; "" if it does."""
        if drill.small_snapshots and self._job.snapshots is None:
            return "there are no snapshots in memory (--snapshot-dir off)"
        if drill.outside is Outside.server:
            foreign = "the server is not this run's: it is not killed"
            return {None: "the job has no rollout server", False: foreign}.get(first.server, "")
        limits = [fact["timeout_seconds"] for fact in self._facts("tools.json")]
        if drill.tool_hangs and not limits:
            return "the script has no tools of a GRPOTrainer"
        return "no call is ended (--tool-timeout 0)" if drill.tool_hangs and 0 in limits else ""

    def _run(self, name: str, drill: Drill | None = None) -> Seen:
        """Run the job once, with what a drill does to it."""
        folder, began = self._work / name, time.monotonic()
        folder.mkdir()
        self._say(f"{name}: {'the job without a fault' if drill is None else drill.done}")
        told = Rehearsal(
            folder=folder, facts=self._work / "facts", free_server=self._job.free_server,
            tool_hangs=drill is not None and drill.tool_hangs,
        )  # fmt: skip
        run = RunDirectory(path=folder / "run")
        words, prefix = self._words(run, drill)
        outside = None if drill is None else drill.outside
        number = signal.SIGKILL if outside is Outside.kill else signal.SIGTERM
        state = {"XDG_STATE_HOME": str(self._work / "state")}
        environment = {**os.environ, **SWITCHED_OFF, **state, **told.variable}
        sent = False

        def act() -> int | None:
            nonlocal sent
            if foreign := self._facts("foreign-server.json"):
                raise UsageError(
                    f"the script sends weights to {foreign[0]}, a server that this command does not start:"
                    " a rehearsal would change it for every run that uses it: let it start one, with"
                    f" --rollout-server COMMAND, or give --free-server {foreign[0]} if no run uses it"
                )
            if outside is None or sent or not run.journal.is_file() or HELD not in run.journal.read_bytes():
                return None
            sent = True
            if outside is not Outside.server:
                return number
            _kill_server(run)
            return None

        codes: list[int | None] = []
        for command in range(1 if drill is None else drill.commands):
            if command == 1 and outside is Outside.truncate:
                _truncate_newest(told.outputs)
            seconds = max(1.0, min(self._longest_seconds, self._deadline - time.monotonic()))
            code = children.launch(
                words, environment=environment, output=folder / "output.log", deadline_seconds=seconds,
                act=act, prefix=prefix,
            )  # fmt: skip
            codes.append(code)
            if code is None:
                break
        left = children.end_all(0.0 if codes[-1] is None else children.LEAVE_SECONDS)
        stopped_at, resumed_at = _second_start(run) if len(codes) == 2 else (None, None)
        traces = read_traces(told.traces)
        seen = Seen(
            codes=tuple(codes), seconds=time.monotonic() - began, weights=weights_of(traces), traces=traces,
            stopped_at=stopped_at, resumed_at=resumed_at, left=left,
        )  # fmt: skip
        return self._with_history(run, seen)

    def _words(self, run: RunDirectory, drill: Drill | None) -> tuple[list[str], list[str]]:
        words = [*self._job.options, "--run-dir", str(run.path), "--metrics-addr", "off"]
        prefix: list[str] = []
        snapshots = self._job.snapshots
        if drill is not None:
            words += drill.words(self._ranks - 1, self._span.fault_step, self._tool_seconds)
            if drill.small_snapshots and snapshots is not None:
                small = run.path.parent / "snapshots"
                small.mkdir()
                snapshots = small
                shown = ["-m"] if os.geteuid() == 0 else ["-r", "-m"]
                prefix = ["unshare", *shown, "sh", "-c", SMALL_DIRECTORY, str(small)]
        words += ["--show-ranks", "all", "--snapshot-dir", "off" if snapshots is None else str(snapshots)]
        return [*words, *self._job.script], prefix

    def _with_history(self, run: RunDirectory, seen: Seen) -> Seen:
        """Add what the journal says."""
        try:
            history = run_reader(run).read().history
        except RunDirectoryError:
            return seen  # refused before it has begun
        self._ranks = max(self._ranks, *(int(rank.removeprefix("rank")) + 1 for rank in seen.traces), 1)
        calls = _events(run, "tool_cancelled")
        changes = {
            "the memory plan has changed how a step is computed": bool(_events(run, "memory_plan_applied")),
            "a sample was left out of the loss": any(one["masked"] for one in calls),
        }
        ended = (f"{one['tool']} was ended after {one['seconds']:g} s" for one in calls)
        tools = {name for name in history.phases if isinstance(name, str) and is_of_agent(name)}
        return replace(
            seen, faults=tuple(history.recoveries), sentence=history.sentence,
            changed=next((text for text, so in changes.items() if so), ""),
            server=next((one["started_by_run"] for one in _events(run, "rollout_server_used")), None),
            tool_seconds=max((history.phases[name].longest_seconds for name in tools), default=0.0),
            ended_calls=tuple(dict.fromkeys(ended)),
        )  # fmt: skip

    def _last_line(self, name: str) -> str:
        lines = (self._work / name / "output.log").read_text(errors="replace").strip().splitlines()
        return (lines or ["the command was refused"])[-1].removeprefix("grpo-run: ")

    def _facts(self, pattern: str) -> list[Any]:
        return [json.loads(file.read_text()) for file in sorted((self._work / "facts").glob(pattern))]

    def _room(self) -> Iterable[Row]:
        """Judge the room for checkpoints, if the undisturbed job has written any."""
        sizes = {
            path: sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
            for path in (self._work / "undisturbed" / "output").glob("*/checkpoint-*")
        }
        if not sizes:
            return
        largest = max(sizes, key=lambda path: sizes[path])
        saving: dict[str, Any] = next(iter(self._facts("saving.json")), {})
        for fact in self._facts("real-*.json"):
            if largest.parent.name.endswith(str(fact["name"])):
                real = Path(str(fact["path"]))
                there = next(folder for folder in (real, *real.parents) if folder.is_dir())
                free = shutil.disk_usage(there).free
                yield judgement.judge_room(
                    str(real), free_bytes=free, checkpoint_bytes=sizes[largest], saving=saving
                )

    def _changes(self) -> Iterator[str]:
        """Yield the files in real output directories that are others than before."""
        for fact in self._facts("real-*.json"):
            real, before = Path(str(fact["path"])), fact["files"]
            with suppress(OSError):  # the script has written into it
                for folder in fact["made"]:
                    os.rmdir(folder)
            if (now := listing(real)) != before:
                old, new = before or {}, now or {}
                changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
                yield from (str(real / name) for name in changed or ("",))


def _truncate_newest(outputs: Path) -> None:
    """Cut the largest file of the newest checkpoint to half, as a full disk or a crash does."""
    found = [path for path in outputs.glob("*/checkpoint-*") if path.name[11:].isdecimal()]
    if not found:
        return
    newest = max(found, key=lambda path: (path.parent.stat().st_mtime, int(path.name[11:])))
    file = max((one for one in newest.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def _kill_server(run: RunDirectory) -> None:
    """Kill the rollout server that a run has started, and nothing else."""
    pid = int(_events(run, "rollout_server_started")[-1]["pid"])
    if pid in descendants(read_processes(), [os.getpid()]):
        os.kill(pid, signal.SIGKILL)


def _events(run: RunDirectory, *names: str) -> list[Mapping[str, Any]]:
    """Return the events of these names, in order; a line that is being written is left out."""
    *lines, _ = run.journal.read_text(errors="replace").split("\n")
    wanted = tuple(f'{{"event":"{name}"' for name in names)
    return [json.loads(line) for line in lines if line.startswith(wanted)]


def _second_start(run: RunDirectory) -> tuple[int | None, int | None]:
    """Return the last step before the second command, and the step that it continued from; None for the
    beginning."""
    starts, stopped, resumed = 0, None, None
    for one in _events(run, "run_started", "step_committed", "resume_chosen"):
        starts += one["event"] == "run_started"
        if starts == 1 and one["event"] == "step_committed":
            stopped = int(one["step"])
        elif starts == 2 and one["event"] == "resume_chosen":
            number = re.search(r"\d+$", one.get("path") or "")
            resumed = int(number[0]) if number else None
    return stopped, resumed
