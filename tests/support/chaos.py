"""The project's own fault campaign: runs with several faults each, two at a time, in slices that resume.

    make chaos FAULTS=200             # the next 200 faults
    make chaos SEED=1 CASE=12         # the faults of run 12 once more; with CASE=12.3 only that one
    make chaos FAULTS=0               # nothing but table and page of what was found so far

`chaos_faults.py` has the kinds, what must follow, and the drawing, `chaos_table.py` what is shown. Launches
are started, ended and compared as those of `grpo-run rehearse`. Each result is a line of `results.jsonl` in
the work directory, written when its run has ended; a run that went wrong keeps its files beside it. Needs
root, because it mounts small file systems.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_run.cli.main import main as grpo_run
from grpo_run.runtime.checkpoints.manifest import MANIFEST
from grpo_run.runtime.checkpoints.search import step_of
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.rehearsal import Rehearsal
from grpo_run.runtime.processes.starting import become_subreaper
from grpo_run.runtime.rehearsal import children
from grpo_run.runtime.rehearsal._seen import read_traces, weights_of
from grpo_run.runtime.snapshots.headroom import DISK_RESERVE_BYTES
from grpo_run.runtime.upstream.tracker_names import SWITCHED_OFF
from grpo_run.watchdog.processes import descendants, read_arguments, read_processes
from support.chaos_faults import KINDS, NOT_TOLD, STEPS, Case, Kind, Run, draw
from support.chaos_table import document, markdown, page, summary
from support.full_disk import SmallDisk, small_disk

ROOT = Path(__file__).parents[2]
LANES = 2
"""Launches at a time."""
DISK_BYTES = MEMORY_BYTES = DISK_RESERVE_BYTES + (24 << 20)
COMMAND_SECONDS = 400.0
"""One command is ended after so long."""
OPTIONS = (
    "--nproc-per-node", "2", "--metrics-addr", "off", "--show-ranks", "all", "--deadline-floor", "4",
    "--deadline-exit", "5",
)  # fmt: skip
SCRIPTS: Mapping[str, Sequence[str]] = {
    "loop": ("loops.py", "--mode", "ddp", "--steps", str(STEPS), "--save-every", "2"),
    "grpo": ("grpo.py", "--cpu", "--max-steps", str(STEPS), "--save-steps", "2"),
    "sft": ("sft.py", "--cpu", "--max-steps", str(STEPS), "--save-steps", "2"),
}
LIMIT = ("--save-total-limit", "2")
TARGETS = {
    "drain worker": "grpo-run drain worker", "forkserver": "grpo-run forkserver", "guardian": "guardian",
}  # fmt: skip
"""How processes below a supervisor are recognized."""


MODEL_CARD = "README.md"
"""What a trainer writes beside its checkpoints."""
CACHES = ("torchinductor_root",)
"""What torch makes in the folder of temporary files, with the name of the user, and keeps."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left of a run."""

    codes: tuple[int | None, ...]
    journal: Sequence[dict[str, Any]]
    weights: Mapping[str, str]
    left: tuple[str, ...]


class RunOfFaults:
    """Runs the faults of one run."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._directory = RunDirectory(path=folder / "run")
        self._waiting = [case for case in run.cases if not KINDS[case.kind].inject]
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._left: list[str] = []

    def ended(self) -> Ended:
        """Run it from the first command to the last."""
        _clear(self._folder)
        (self._folder / "tmp").mkdir(parents=True)
        with (
            small_disk(self._folder / "output", DISK_BYTES) as self._disk,
            small_disk(self._folder / "snapshots", MEMORY_BYTES) as self._memory,
        ):
            told = Rehearsal(folder=self._folder, facts=self._folder / "facts", steps=STEPS)
            environment = {
                **os.environ, **SWITCHED_OFF, **told.variable, "XDG_STATE_HOME": str(self._folder / "state"),
                "TMPDIR": str(self._folder / "tmp"),
            }  # fmt: skip
            endings = [case for case in self._run.cases if KINDS[case.kind].code]
            codes: list[int | None] = []
            for ending in [*endings, None]:
                codes.append(
                    children.launch(
                        self._words(), environment=environment, output=self._folder / "output.log",
                        deadline_seconds=COMMAND_SECONDS, act=self._act,
                    )
                )  # fmt: skip
                self._undo_due(math.inf)
                if ending is None or codes[-1] != KINDS[ending.kind].code:
                    break
                self._before_the_next(KINDS[ending.kind].between)
            self._left += [f"process {one}" for one in children.end_all()]
            if codes[-1] == 0:
                self._left += [f"file {one}" for one in self._files_left()]
            weights = weights_of(read_traces(told.traces))
        return Ended(codes=tuple(codes), journal=self._events(), weights=weights, left=tuple(self._left))

    def _words(self) -> list[str]:
        script, *arguments = SCRIPTS[self._run.job]
        faults = [word for case in self._run.cases for word in ("--inject", case.injection)]
        return [
            *OPTIONS, "--run-dir", str(self._directory.path), "--snapshot-dir", str(self._memory.folder),
            *faults, str(ROOT / "tests" / "scripts" / script), "--output-dir", str(self._folder / "real"),
            *arguments, *LIMIT,
        ]  # fmt: skip

    def _events(self) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._directory.journal.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # torn, or being written
                    found.append(json.loads(line))
                    if folder := found[-1].get("incident"):
                        verdict = json.loads((Path(folder) / "verdict.json").read_text())
                        found[-1]["culprits"] = verdict["culprits"]
        return found

    def _act(self) -> None:
        """Do what is due from outside."""
        self._undo_due(time.monotonic())
        if not self._waiting or not self._directory.journal.is_file():
            return
        text = self._directory.journal.read_text(errors="replace")
        for case in [one for one in self._waiting if f'"injection":"{one.injection}"' in text]:
            self._waiting.remove(case)
            self._do(KINDS[case.kind], case.rank)

    def _do(self, kind: Kind, rank: int) -> None:
        undo: Callable[[], None] | None = None
        if kind.room:
            self._undo_due(math.inf)  # a save fails if there is no room in either place
            disk = self._memory if kind.room == "memory" else self._disk
            if kind.room == "read-only":
                _remount(disk, "ro")
            else:
                disk.leave(0)
            undo = functools.partial(_remount, disk, "rw") if kind.room == "read-only" else disk.empty
        elif kind.to == "command":
            with contextlib.redirect_stdout(io.StringIO()):
                grpo_run(["stop", str(self._directory.path)])
        else:
            pids = self._pids(kind.to, rank)
            for number in kind.send:
                _signal(pids, number)
            undo = functools.partial(_signal, pids, signal.SIGCONT)
        if kind.lasts_seconds and undo is not None:
            self._undo.append((time.monotonic() + kind.lasts_seconds, undo))

    def _undo_due(self, now: float) -> None:
        due = [one for one in self._undo if one[0] <= now]
        self._undo = [one for one in self._undo if one[0] > now]
        for _, undo in due:
            undo()

    def _pids(self, to: str, rank: int) -> list[int]:
        """Return the processes that a signal is sent to, the supervisor first."""
        events = self._events()
        supervisor = [event["supervisor_pid"] for event in events if event["event"] == "run_started"][-1]
        ranks = {event["rank"]: event["pid"] for event in events if event["event"] == "rank_started"}
        below = descendants(read_processes(), [supervisor])
        return {
            "supervisor": lambda: [supervisor],
            "rank": lambda: [ranks[rank]],
            "ranks": lambda: [*ranks.values()],
            "all": lambda: [supervisor, *below - {supervisor}],
        }.get(to, lambda: [pid for pid in below - {supervisor} if TARGETS[to] in read_arguments(pid)])()

    def _before_the_next(self, what: str) -> None:
        """Damage what is on disk, before the same command is given again."""
        # the guardian of a killed supervisor is still at work
        self._left += [f"process {one}" for one in children.end_all()]
        if what == "journal":
            with open(self._directory.journal, "a") as file:
                file.write('{"event":"step_committed","time":17')
        elif what == "memory":
            for path in self._memory.folder.iterdir():
                shutil.rmtree(path)
        elif what:
            found = [path for path in self._disk.folder.parent.glob("*/checkpoint-*") if step_of(path)]
            newest = max(found, key=lambda path: step_of(path) or 0)
            files = [one for one in newest.rglob("*") if one.is_file()]
            largest = max(files, key=lambda one: one.stat().st_size)
            if what == "manifest":
                (newest / MANIFEST).unlink()
            elif what == "truncate":
                os.truncate(largest, largest.stat().st_size // 2)
            else:
                content = bytearray(largest.read_bytes())
                content[len(content) // 2] ^= 1
                largest.write_bytes(content)

    def _files_left(self) -> Iterable[str]:
        """Yield what a run that has finished has left besides its checkpoints."""
        kinds = {case.kind for case in self._run.cases}
        # the guardian removes it, unless it is killed as well
        allowed = (*CACHES, *(("pymp-",) if kinds & {"guardian-kill", "all-kill", "memory-lost"} else ()))
        temporary = (self._folder / "tmp").iterdir()
        yield from (str(path) for path in temporary if not path.name.startswith(allowed))
        yield from (str(path) for path in self._memory.folder.rglob("*") if not path.is_dir())
        damaged = any(KINDS[kind].between for kind in kinds)
        for path in self._disk.folder.parent.glob("*/*"):
            rejected = damaged and path.name.startswith("rejected-checkpoint-")
            if step_of(path) is None and not rejected and path.name != MODEL_CARD:
                yield str(path)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _remount(disk: SmallDisk, how: str) -> None:
    # fails while a file is open for writing; the next try is as good
    for _ in range(100):
        if not subprocess.run(
            ["mount", "-o", f"remount,{how}", str(disk.folder.parent)], capture_output=True
        ).returncode:
            return
        time.sleep(0.01)
    raise OSError(f"{disk.folder.parent} cannot be mounted anew ({how})")


def _clear(folder: Path) -> None:
    """Remove what an earlier try has left."""
    for name in ("output", "snapshots"):
        if os.path.ismount(folder / name):
            subprocess.run(["umount", "-l", str(folder / name)], check=True, timeout=30)
    shutil.rmtree(folder, ignore_errors=True)


# ---- judging ----


def judge(run: Run, ended: Ended, expected: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one result for each fault.

    Args:
        expected: weights of the undisturbed run.
    """
    journal = ended.journal
    changed = any(event["event"].startswith("memory_plan") for event in journal)
    equal = ended.weights == expected
    fired = {
        event["injection"]: index for index, event in enumerate(journal) if event["event"] == "fault_injected"
    }
    codes = [KINDS[case.kind].code for case in run.cases if KINDS[case.kind].code]
    results = []
    before_failed = False
    for number, case in enumerate(run.cases):
        kind, at = KINDS[case.kind], fired.get(case.injection)
        later = [fired[one.injection] for one in run.cases[number + 1 :] if one.injection in fired]
        # what is seen before the first fault is wrong as well
        began = at if number else 0
        found = journal[began : min(later, default=len(journal))] if at is not None else []
        incidents = [event for event in found if event["event"] == "incident"]
        wrong, cause_right, rank_right = _wrong_verdict(kind, case, incidents)
        if kind.event and not any(event["event"] == kind.event for event in found):
            wrong.append(f"no {kind.event}")
        if at is None:
            wrong = ["it never happened"]
        if kind.code:
            place = codes.index(kind.code)
            got = ended.codes[place] if len(ended.codes) > place else None
            if got != kind.code:
                wrong.append(f"the command ended with {got}, not {kind.code}")
        weights = "equal" if equal else "plan changed" if changed else "differ"
        if ended.codes[-1] != 0:
            weights = "no end"
            if at is None or not later:
                wrong.append(f"the run ended with {ended.codes[-1]}")
        elif weights == "differ":
            wrong.append("weights differ")
        wrong += ended.left
        first = incidents[0] if incidents else {}
        results.append({
            "seed": run.seed, "case": case.name, "job": run.job, "kind": case.kind, "rank": case.rank,
            "step": case.step, "phase": case.phase, "done": not (before_failed and at is None),
            "wrong": wrong, "cause": first.get("cause"), "cause_right": cause_right,
            "culprits": first.get("culprits", []), "rank_right": rank_right, "weights": weights,
            "sentence": first.get("sentence", ""), "detected_seconds": first.get("detection_seconds"),
            "recovered_seconds": None if at is None or kind.last else _recovered(journal[at:], kind),
            "left": list(ended.left),
        })  # fmt: skip
        before_failed = before_failed or (ended.codes[-1] != 0 and bool(wrong))
    return results


def _wrong_verdict(
    kind: Kind, case: Case, incidents: Sequence[dict[str, Any]]
) -> tuple[list[str], bool, bool]:
    """Return what is wrong with the verdicts on a fault, and whether cause and rank are right."""
    causes = kind.right_causes(case.phase)
    if not causes or not incidents:
        right = not causes and not incidents
        said = f"taken for {incidents[0]['cause']}" if incidents else "not seen"
        return [] if right else [said], right, right
    first, culprits = incidents[0], incidents[0]["culprits"]
    cause_right = first["cause"] in causes and len(incidents) == 1
    rank_right = (
        kind.rank == "any"
        or culprits == [case.rank]
        or (kind.rank is None and not culprits and NOT_TOLD in first["sentence"])
    )
    wrong = [] if first["cause"] in causes else [f"cause {first['cause']}, not {' or '.join(sorted(causes))}"]
    wrong += [f"also {event['cause']}" for event in incidents[1:]]
    wrong += [] if rank_right else [f"ranks {culprits}, not {case.rank}"]
    return wrong, cause_right, rank_right


def _recovered(later: Sequence[dict[str, Any]], kind: Kind) -> float | None:
    """Return the seconds from a fault to the next committed step of the next attempt or command; None if its
    steps were not seen before it ended.

    Args:
        later: the journal from the fault on.
    """
    begins = [index for index, event in enumerate(later) if event["event"] == "attempt_started"]
    if not begins or not (kind.causes or kind.stall or kind.code):
        return None
    attempt = later[begins[0] : begins[1] if len(begins) > 1 else None]
    step = next((event for event in attempt if event["event"] == "step_committed"), None)
    return round(step["committed_at"] - later[0]["time"], 2) if step is not None else None


# ---- the campaign ----


def run_one(run: Run, work: Path, expected: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run the faults of a run, in a process without other children; keep its files if something is wrong."""
    become_subreaper()
    folder, began = work / f"run-{run.number}", time.monotonic()
    ended = RunOfFaults(run, folder).ended()
    (work / f"run-{run.number}.json").write_text(json.dumps(asdict(ended)))
    results = judge(run, ended, expected)
    seconds = round((time.monotonic() - began) / len(run.cases), 2)
    if not any(result["wrong"] for result in results):
        _clear(folder)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return [{**result, "seconds": seconds, "at": date} for result in results]


def undisturbed(job: str, work: Path) -> dict[str, str]:
    """Return the weights of a job without a fault, which is run once for all slices."""
    become_subreaper()
    kept = work / f"undisturbed-{job}.json"
    if not kept.is_file():
        ended = RunOfFaults(Run(seed=0, number=0, job=job), work / f"undisturbed-{job}").ended()
        assert (ended.codes, ended.left, bool(ended.weights)) == ((0,), (), True), (ended.codes, ended.left)
        kept.write_text(json.dumps(dict(ended.weights)))
    found: dict[str, str] = json.loads(kept.read_text())
    return found


def missing(seed: int, faults: int, results: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Return the next runs of a campaign with at least so many faults, without those that have results."""
    finished = {result["case"].partition(".")[0] for result in results if result["seed"] == seed}
    chosen: list[Run] = []
    number = 0
    while sum(len(run.cases) for run in chosen) < faults:
        if str(number) not in finished:
            chosen.append(draw(seed, number))
        number += 1
    return chosen


def read_results(work: Path) -> list[dict[str, Any]]:
    """Return the results of a work directory; the line that a killed campaign has begun is left out."""
    file = work / "results.jsonl"
    *lines, _ = file.read_text().split("\n") if file.is_file() else [""]
    return [json.loads(line) for line in lines]


def campaign(runs: Sequence[Run], work: Path, *, keep: bool = True) -> list[dict[str, Any]]:
    """Run them, some at a time, and return their results.

    Args:
        keep: add the results to those of the work directory.
    """
    work.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(LANES, mp_context=multiprocessing.get_context("spawn")) as lanes:
        jobs = list(dict.fromkeys(run.job for run in runs))
        expected = dict(zip(jobs, lanes.map(undisturbed, jobs, [work] * len(jobs)), strict=True))
        waiting = list(runs)
        running: set[Future[list[dict[str, Any]]]] = set()
        while waiting or running:
            # none is queued: Ctrl-C ends those under way, and another would begin
            while waiting and len(running) < LANES:
                run = waiting.pop(0)
                running.add(lanes.submit(run_one, run, work, expected[run.job]))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            results = [one for future in done for one in future.result()]
            found += results
            if keep:
                with open(work / "results.jsonl", "a") as file:
                    file.write("".join(f"{json.dumps(result)}\n" for result in results))
            wrong = [one for one in results if one["wrong"]]
            said = " | ".join(f"{one['case']} {one['kind']}: {'; '.join(one['wrong'])}" for one in wrong)
            print(f"{len(found)} faults · {said or 'as specified'}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="at least so many more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="", help="RUN or RUN.FAULT, run alone")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "chaos")
    parser.add_argument("--table", type=Path, help="also write the page of docs/")
    given = parser.parse_args()
    work, began = given.work.resolve(), time.monotonic()
    if os.geteuid() != 0:
        sys.exit("make chaos mounts small file systems: run it as root")
    os.chdir(ROOT)
    if given.case:
        run = draw(given.seed, int(given.case.partition(".")[0]))
        run = replace(run, cases=tuple(one for one in run.cases if one.name == given.case) or run.cases)
        found = campaign([run], work, keep=False)
        print(json.dumps(found, indent=1))
        return int(any(one["wrong"] for one in found))
    found = campaign(missing(given.seed, given.faults, read_results(work)), work) if given.faults else []
    results = read_results(work)
    (work / "table.md").write_text(f"{summary(results)}\n\n{markdown(results)}\n")
    (work / "page.html").write_text(page(results))
    if given.table:
        given.table.write_text(document(results))
    minutes = (time.monotonic() - began) / 60
    print(f"{len(found)} faults in {minutes:.1f} min. {summary(results)} {work}/page.html")
    return int(any(one["wrong"] for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
