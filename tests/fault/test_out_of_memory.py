"""A rank that runs out of memory in the script's own code is named, with the phase, and its peers are not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import containers
from support.memory_plans import SEGMENTS
from support.references import plain_ranks
from support.runs import BIN, SCRIPTS, Run, Runs, digest

IN_SMALL_SHARED_MEMORY = (
    "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"',
    str(BIN / "grpo-run"),
)  # fmt: skip
DIES = """
import ctypes, mmap, os, pathlib
import torch
torch.distributed.init_process_group("gloo")
marker = pathlib.Path("died")
if torch.distributed.get_rank() == 1 and not marker.exists():
    marker.touch()
    {fault}
torch.distributed.barrier()
"""
THROWS = "ctypes.CDLL('libstdc++.so.6')._ZSt17__throw_bad_allocv()"
FILLS = (
    "memory = os.open('/dev/shm/big', os.O_RDWR | os.O_CREAT); os.ftruncate(memory, 1 << 26);"
    " mmap.mmap(memory, 1 << 26).write(bytes(1 << 26))"
)
LAUNCHED = ("--nproc-per-node", "2", str(SCRIPTS / "exhausted.py"), "--output-dir", "out", "--max-steps", "4")


def test_exhausted_memory_at_the_first_step_is_named_and_a_quotation_is_not(runs: Runs) -> None:
    """The reward of this script prints such a message in every call, and an error of its own quotes it in
    step 3.
    """
    run = runs(*LAUNCHED, "--place", "backward@1", "--place", "quoted@3").start().ended()
    first, second = run.verdicts()
    assert (first["cause"], first["culprits"], first["waiters"]) == ("gpu_oom", [1], [0]), first["sentence"]
    assert (
        first["sentence"]
        == "Rank 1 ran out of GPU memory in step 1 (phase backward): tried to allocate 1.5 GiB with 1.2 GiB"
        " of 79.2 GiB free."
    )
    assert first["shortage"]["phase"] == "backward"
    assert first["location"]["function"] == "fail"
    event, _ = run.events("incident")
    assert event["shortage"] == first["shortage"]
    assert event["lost_connection"] == [0], event
    assert (second["cause"], second["shortage"]) == ("exception", None), second["sentence"]


@pytest.mark.full
def test_an_exception_of_cplusplus_that_ends_a_rank_is_named(runs: Runs, tmp_path: Path) -> None:
    """The process is aborted and leaves nothing but what the C++ runtime prints; the first failed start is
    tried again.
    """
    (tmp_path / "dies.py").write_text(DIES.format(fault=THROWS))
    run = runs("--nproc-per-node", "2", "dies.py").start().ended()
    (verdict,) = run.verdicts()
    assert (verdict["cause"], verdict["culprits"]) == ("host_oom", [1]), verdict["sentence"]
    assert verdict["sentence"] == "Rank 1 ran out of host memory before the first step: std::bad_alloc."


@pytest.mark.full
@pytest.mark.skipif(containers.missing() is not None, reason=str(containers.missing()))
def test_a_write_into_a_full_shared_memory_is_named(runs: Runs, tmp_path: Path) -> None:
    """The kernel sends SIGBUS; /dev/shm has 8 MiB here."""
    (tmp_path / "dies.py").write_text(DIES.format(fault=FILLS))
    run = runs("--nproc-per-node", "2", "dies.py", program=IN_SMALL_SHARED_MEMORY, cold=True).start().ended()
    (verdict,) = run.verdicts()
    assert (verdict["cause"], verdict["culprits"]) == ("shm_full", [1]), verdict["sentence"]
    assert "killed by SIGBUS" in verdict["sentence"]


RESTART = "restart"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place at which memory runs out, once or always, and what is expected of the run.

    Attributes:
        name: of `exhausted.py`, with the step.
        phase: that the verdict names.
        named: what the sentence says of the place.
        answers: what follows one failure after the other: a restart as it is, or a plan. One is enough if it
            fails once.
        advice: a part of the last line if it always fails.
        calls: of `train()`.
    """

    name: str
    phase: str
    named: str
    answers: tuple[Any, ...]
    advice: str
    calls: int = 1

    def __str__(self) -> str:
        return self.name

    def run(self, runs: Runs, *words: str) -> Run:
        """Return a run of the script, not started yet."""
        return runs(
            "--nproc-per-node", "2", str(SCRIPTS / "exhausted.py"), *self.words, "--output-dir", "out",
            "--place", self.name, *words,
        )  # fmt: skip

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of the script. A rollout serves two optimizer steps."""
        return (
            "--max-steps", "4", "--save-steps", "1", "--per-device-train-batch-size", "8",
            "--steps-per-generation", "2",
            "--save-inside-rollouts", "--num-generations", "4", "--calls", str(self.calls),
        )  # fmt: skip


ONLY_FREE = (RESTART, SEGMENTS)
PLACES = [
    Place(
        name="reward@3", phase="reward", named="in step 3 (phase reward), at exhausted.py:",
        answers=ONLY_FREE,
        advice="Let the reward function use less memory",
    ),
    Place(
        name="callback@2", phase="callback",
        named="in step 2 (callback FailingCallback.on_step_end), at exhausted.py:",
        answers=ONLY_FREE, advice="Let the callback use less memory",
    ),
    Place(
        name="before@1", phase="script",
        named="before the first step, in the script's own code at exhausted.py:",
        answers=(RESTART,), advice="Let the script use less memory",
    ),
    Place(
        name="between@1", phase="script",
        named="after step 4 (phase idle), in the script's own code at exhausted.py:",
        answers=ONLY_FREE, advice="Let the script use less memory", calls=2,
    ),
    Place(
        name="wrapped@3", phase="script",
        named="in step 3 (phase generate), in the script's own code at exhausted.py:",
        answers=ONLY_FREE, advice="Let the script use less memory",
    ),
    Place(
        name="data@2", phase="script",
        named="in step 2 (phase data), in the script's own code at exhausted.py:",
        answers=ONLY_FREE, advice="Let the script use less memory",
    ),
]  # fmt: skip


def answers_of(run: Run) -> list[Any]:
    """What followed each failure: the action, or the plan if it was changed."""
    plans = iter(event["plan"] for event in run.events("plan_changed"))
    actions = [event["action"] for event in run.events("action")]
    return [next(plans) if action == "restart_with_plan_change" else action for action in actions]


def check_places(run: Run, place: Place) -> None:
    """Hold that every verdict names the cause, the rank and the place."""
    for verdict in run.verdicts():
        assert (verdict["cause"], verdict["culprits"]) == ("gpu_oom", [1]), verdict["sentence"]
        assert verdict["shortage"]["phase"] == place.phase, verdict["sentence"]
        assert place.named in verdict["sentence"]


def holds_once(place: Place, runs: Runs, tmp_path: Path) -> None:
    """Hold that the run ends in the weights of the undisturbed one."""
    words = [str(SCRIPTS / "exhausted.py"), *place.words, "--output-dir", str(tmp_path / "reference")]
    plain_ranks(tmp_path, words, ranks=2)
    run = place.run(runs).start().ended()
    check_places(run, place)
    assert answers_of(run) == [place.answers[0]], run.tail()
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def holds_always(place: Place, runs: Runs) -> None:
    """Hold that nothing is changed in vain, and that the run ends with the advice for the phase."""
    run = place.run(runs, "--always").start().ended(93)
    check_places(run, place)
    assert answers_of(run) == [*place.answers, "stop"], run.tail()
    (last,) = (line for line in run.printed().splitlines() if "Gave up: " in line)
    assert place.advice in last
    assert "generations" not in last


def test_memory_that_a_reward_always_exhausts_ends_the_run_without_changes_in_vain(runs: Runs) -> None:
    (reward,) = (place for place in PLACES if place.phase == "reward")
    holds_always(reward, runs)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_memory_that_is_exhausted_once_in_any_place_costs_no_weights(
    place: Place, runs: Runs, tmp_path: Path
) -> None:
    holds_once(place, runs, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_memory_that_is_always_exhausted_in_any_place_ends_the_run_with_its_advice(
    place: Place, runs: Runs
) -> None:
    holds_always(place, runs)
