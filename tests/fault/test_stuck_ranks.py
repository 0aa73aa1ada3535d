"""A rank that nothing alive can wake is found within seconds, in the user's own code, and the run
recovers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

SCRIPT = "stuck.py"
WHAT = {
    "lock": "waits for a lock that no running thread can release",
    "queue": "waits for a queue that no running thread can feed",
    "join": "waits for a thread that cannot end",
    "future": "waits for a future that no running thread can complete",
    "sleep": "waits for the end of a sleep",
    "child": "waits for a child process that cannot end",
    "stopped-child": "waits for a child process that cannot end",
}
CAUSES = {"first-step": "reward_stall", "reward": "reward_stall", "thread": "reward_stall"}


def line_of(kind: str) -> int:
    """Return the line of the script in which a kind of hang waits."""
    lines = (SCRIPTS / SCRIPT).read_text().splitlines()
    (number,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# HANG: {kind}")]
    return number


def stuck_run(
    runs: Callable[..., Run], place: str, kind: str, *words: str, ranks: int = 2
) -> tuple[Run, dict[str, Any], float]:
    """Run the script; return the run, its only verdict, and the seconds from the hang to its detection."""
    run = runs(
        "--nproc-per-node", str(ranks), str(SCRIPTS / SCRIPT), "--output-dir", "out", "--max-steps", "8",
        "--save-steps", "2",
        "--place", place, "--kind", kind, *words,
    ).start()  # fmt: skip
    assert run.wait(150) == 0, run.tail()
    (event,) = run.events("incident")
    found = next(
        event
        for event in run.events("state_changed")
        if event["to"] in ("collecting", "stopping", "finished")
    )
    verdict: dict[str, Any] = json.loads((Path(event["incident"]) / "verdict.json").read_text())
    return run, verdict, found["time"] - event["failed_at"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("place", "kind"), [("callback", "lock"), pytest.param("between", "sleep", marks=pytest.mark.full)]
)
def test_a_stuck_rank_is_proved_within_15_seconds(
    runs: Callable[..., Run], tmp_path: Path, place: str, kind: str
) -> None:
    """Rank, cause and line are right, although no deadline of this phase has passed or was learned."""
    _, verdict, seconds = stuck_run(runs, place, kind)
    assert verdict["confidence"] == "proved", verdict["sentence"]
    assert (verdict["culprits"], verdict["waiters"]) == ([1], [0]), verdict["sentence"]
    assert verdict["cause"] == "no_progress"
    assert WHAT[kind] in verdict["sentence"], verdict["sentence"]
    location = verdict["location"]
    assert (Path(location["file"]).name, location["line"]) == (SCRIPT, line_of(kind))
    assert seconds <= 15.0
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 8)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["lock", "queue", "join", "future", "sleep", "child", "stopped-child"])
@pytest.mark.parametrize(
    "place",
    [
        "startup",
        "map",
        "first-step",
        "reward",
        "thread",
        "data",
        "generate",
        "callback",
        "save",
        "evaluation",
        "between",
        "exit",
    ],
)
def test_every_hang_is_proved_at_every_place(
    runs: Callable[..., Run], tmp_path: Path, place: str, kind: str
) -> None:
    """Within 15 s, in phases that nothing is known of too, beside tqdm's monitor and workers of a data
    loader.
    """
    if (place, kind) == ("exit", "sleep"):
        pytest.skip("after the last line a sleep has no deadline to miss; exit hangs have their own rule")
    words = ("--workers", "2") if place not in ("data", "evaluation") else ()
    if place == "evaluation":
        words = ("--eval-prompts", "4", "--settings", '{"eval_strategy": "steps", "eval_steps": 3}')
    run, verdict, seconds = stuck_run(runs, place, kind, *words)
    assert verdict["confidence"] == "proved", verdict["sentence"]
    assert verdict["culprits"] == [1], verdict["sentence"]
    assert run.status()["attempts"] == (1 if place == "exit" else 2)
    assert seconds <= (20.0 if kind == "stopped-child" else 15.0)


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("ranks", "hanging"), [(1, (0,)), (2, (0, 1)), (4, (2,))])
def test_any_number_of_ranks_may_be_stuck(
    runs: Callable[..., Run], ranks: int, hanging: tuple[int, ...]
) -> None:
    """A single rank, all ranks at the same place, and one of four."""
    words = ("--ranks", *map(str, hanging), "--settings", '{"disable_tqdm": false}')
    _, verdict, seconds = stuck_run(runs, "callback", "lock", *words, ranks=ranks)
    assert (verdict["confidence"], verdict["culprits"]) == ("proved", list(hanging)), verdict["sentence"]
    assert WHAT["lock"].removeprefix("waits") in verdict["sentence"]
    assert seconds <= 15.0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_rank_that_waits_legitimately_is_never_suspected(runs: Callable[..., Run]) -> None:
    """Twenty-two ways to wait for something alive, 9 s each."""
    run = runs(
        "--deadline-floor", "60", "--nproc-per-node", "2", str(SCRIPTS / "patient.py"), "--output-dir", "out",
        "--save-steps", "10",
    ).start()  # fmt: skip
    assert run.wait(500) == 0, run.tail()
    assert run.events("incident") == []
    assert run.events("suspicion") == []
    assert run.status()["attempts"] == 1
