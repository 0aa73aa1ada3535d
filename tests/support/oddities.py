"""Run healthy runs with oddities and collect their results; the scenarios are in `oddity_scenarios.py`.

`tests/fault/test_healthy_oddities.py` runs them and keeps the results.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support import moved_clock, references
from support.oddity_scenarios import FREEZES, Scenario
from support.runs import SCRIPTS, Run, Runs, descendants, digest

SCRIPT = "oddities.py"
STEPS = 16
FREEZE_AT_STEP = 5
HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a scenario came to; `wrong` names what is not as it must be."""

    name: str
    parts: tuple[str, ...]
    seconds: float
    incidents: int
    warnings: tuple[str, ...]
    wrong: tuple[str, ...]


def _burn(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10_000))


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep every core busy for the length of the block."""
    context = multiprocessing.get_context("spawn")
    cores = range(os.cpu_count() or 2)
    burners = [context.Process(target=_burn, args=(os.getpid(),), daemon=True) for _ in cores]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join(10)


def unsupported(scenario: Scenario) -> str | None:
    """Return why a scenario cannot be run here, or None."""
    return moved_clock.unsupported() if {"forward", "back"} & set(scenario.conditions) else None


def check(scenario: Scenario, runs: Runs, folder: Path) -> Result:
    """Run a scenario and return its result."""
    if scenario.compare:
        expected = references.undisturbed_command(_words(scenario, None), ranks=scenario.ranks)
    with load() if "load" in scenario.conditions else contextlib.nullcontext():
        clock = None
        if {"forward", "back"} & set(scenario.conditions):
            clock = moved_clock.MovedClock(folder)
        run = runs(
            "--nproc-per-node", str(scenario.ranks), *_words(scenario, "ours"),
            environment=clock.environment if clock else None, cold=True if clock else None,
        )  # fmt: skip
        began = time.monotonic()
        run.start()
        if "nice" in scenario.conditions:
            os.setpriority(os.PRIO_PROCESS, run.process.pid, 19)
        wrong = []
        try:
            for condition, (who, frozen_seconds) in FREEZES.items():
                if condition in scenario.conditions:
                    _freeze(run, who, frozen_seconds)
            if clock is not None:
                run.until_step(FREEZE_AT_STEP, timeout_seconds=120)
                clock.move(HOUR if "forward" in scenario.conditions else -HOUR)
            code = run.wait(600 if scenario.ranks == 8 else 300)
        except AssertionError as error:
            wrong.append(f"did not end: {str(error).splitlines()[0]}")
            code = 0
    seconds = time.monotonic() - began
    incidents = run.events("incident")
    if code != 0:
        wrong.append(f"exit code {code}: {run.tail(600)}")
    if len(incidents) > scenario.most_incidents:
        wrong += [f"incident: {event['sentence']}" for event in incidents]
    wrong += [
        f"did not happen: {word}"
        for word in (*scenario.oddities, *scenario.groups)
        # a callback at a save follows its checkpoint, so a run that resumes from it does not call it again
        if not _happened(word, run) and not (incidents and "@save:" in word)
    ]
    if scenario.compare and code == 0 and not wrong and digest(folder / "ours") != expected:
        wrong.append("the weights differ from the undisturbed run's")
    return Result(
        name=scenario.name,
        parts=tuple(scenario.parts),
        seconds=seconds,
        incidents=len(incidents),
        warnings=tuple(event["text"] for event in run.events("warning")),
        wrong=tuple(wrong),
    )


def _words(scenario: Scenario, output: str | None) -> list[str]:
    """Return the script and its arguments; without an output directory, those of the undisturbed run."""
    words = [str(SCRIPTS / SCRIPT), "--max-steps", str(STEPS), "--save-steps", "4", *scenario.arguments]
    if output is None:
        return words
    words += [word for text in scenario.oddities for word in ("--oddity", text)]
    words += [word for text in scenario.groups for word in ("--group-oddity", text)]
    return [*words, "--output-dir", output]


def _happened(word: str, run: Run) -> bool:
    """Whether a wait has ended, by what the rank printed."""
    name, _, place = re.split("[:@]", word)[:3]
    end = f": {name} done" if place.isdigit() else f": {name} at {place} took"
    logs = run.directory.glob("attempts/*/rank*.log")
    return any(end in log.read_text(errors="replace") for log in logs)


def _freeze(run: Run, who: str, seconds: float) -> None:
    """Stop processes of a run for a time, as a suspended machine, a terminal or a debugger does."""
    run.until_step(FREEZE_AT_STEP, timeout_seconds=120)
    supervisor = run.process.pid
    everyone = [supervisor, *descendants(supervisor)]
    pids = {"everyone": everyone, "supervisor": [supervisor], "rank": [run.pid(1)]}[who]
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
