"""Runs on one machine that share /dev/shm, with equal paths and commands: each ends in its own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import containers
from support.containers import Container
from support.references import plain_ranks
from support.runs import SCRIPTS, digest
from support.whole_runs import kill_all, memory_of

Launch = Callable[[str, int, list[str]], Container]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Launch]:
    """Make containers by name, seed and arguments of the script."""
    reason = containers.missing()
    if reason is not None:
        pytest.skip(reason)
    made: list[Container] = []

    def make(name: str, seed: int, words: list[str]) -> Container:
        made.append(Container(tmp_path, name, seed, words))
        return made[-1]

    yield make
    for one in made:
        one.close()


def undisturbed(folder: Path, seed: int, words: list[str]) -> str:
    """Return the digest of the weights of the same training without launcher and neighbours."""
    folder.mkdir()
    plain_ranks(
        folder, [str(SCRIPTS / "sft.py"), "--output-dir", "out", "--seed", str(seed), *words], ranks=1
    )
    return digest(folder / "out")


def kill_in_turn(run: Container, *, at_step: int) -> int:
    """Kill every process of a run after a snapshot of this step, and start it again; return the snapshot's
    step.
    """
    run.until(
        lambda events: [
            event for event in events if event["event"] == "checkpoint_staged" and event["step"] >= at_step
        ]
    )
    kill_all(run)
    staged = max(event["step"] for event in run.events("checkpoint_staged"))
    run.start()
    return int(staged)


def resumed_steps(run: Container) -> list[int]:
    return [event["step"] for event in run.events("train_started") if event["rank"] == 0]


def test_two_containers_with_one_shared_memory_do_not_touch_each_other(
    container: Launch, tmp_path: Path
) -> None:
    """Every process of each is killed once; each goes on from its own newest snapshot, which is in memory
    only.
    """
    words = ["--max-steps", "30", "--save-steps", "1000", "--step-seconds", "0.1"]
    runs = [container(f"container-{seed}", seed, words).start() for seed in (11, 12)]
    killed_at = [kill_in_turn(run, at_step=4) for run in runs]
    for run, step in zip(runs, killed_at, strict=True):
        run.ended()
        first, second = resumed_steps(run)
        assert first == 0
        assert second >= step, f"a snapshot of step {step} was in memory:\n{run.tail()}"
    (one, other) = (run.events("run_started")[0]["run"] for run in runs)
    assert one == other, "both have the same path and command"
    quick = words[:4]
    for run, seed in zip(runs, (11, 12), strict=True):
        assert digest(run.folder / "out") == undisturbed(tmp_path / f"plain-{seed}", seed, quick)
        assert not memory_of(run).exists()
