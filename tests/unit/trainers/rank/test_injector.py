"""When a rank hurts itself, in which order, how often, and what the others do meanwhile; the deeds are replaced or small."""

from __future__ import annotations

import atexit
import signal
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injection import KINDS, parse_all
from grpo_run.trainers.rank import injector as module
from grpo_run.trainers.rank.injector import DEEDS, InjectedFault, Injector
from grpo_run.watchdog.observation import Phase


class Log:
    """A journal, and everything else, in the order in which it happened."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append("written")
        self.records.append({"event": event, **fields})

    def sync(self) -> None:
        self.lines.append("on disk")


@pytest.fixture
def log() -> Log:
    """Empty."""
    return Log()


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Every deed and the common call say only that they came."""
    for name in DEEDS:
        monkeypatch.setitem(
            DEEDS, name, lambda injector, injection: log.lines.append(f"{injection} on {injector.rank}")
        )
    monkeypatch.setattr(module, "_common", lambda injector: log.lines.append(f"common on {injector.rank}"))


def make(
    log: Log, *texts: str, rank: int = 1, world_size: int = 3, fired: set[str] | None = None
) -> Injector:
    """The injector of one rank."""
    return Injector(parse_all(texts), rank=rank, world_size=world_size, journal=log, fired=fired or set())


def alone(number: int) -> int:
    """The highest number of one rank's."""
    return number


STEP = [
    Phase.data, Phase.forward_backward, Phase.score, Phase.generate, Phase.reward, Phase.reward, Phase.vote,
    Phase.optimizer, Phase.vote,
]  # fmt: skip
"""What a step of GRPO enters, in order; a reward function is entered inside the phase of all rewards."""


def steps(injector: Injector, first: int, last: int) -> None:
    """The phases of whole steps, as a guarded trainer enters them."""
    for step in range(first, last + 1):
        for phase in STEP:
            injector.on_phase(phase, step)


def test_every_kind_has_a_deed_of_its_own() -> None:
    """So that a stack names it."""
    assert list(DEEDS) == list(KINDS)
    assert len({deed.__name__ for deed in DEEDS.values()}) == len(KINDS)


@pytest.mark.usefixtures("deeds")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].common and kind != "checkpoint"])
def test_it_is_on_disk_before_it_is_done(log: Log, kind: str) -> None:
    """A kill leaves no other chance, and an unwritten one would come again in the next attempt."""
    steps(make(log, f"{kind}@rank1:step3"), 1, 5)
    assert log.lines == ["written", "on disk", f"{kind}@rank1:step3 on 1"]
    assert log.records == [
        {
            "event": "fault_injected",
            "rank": 1,
            "step": 3,
            "kind": kind,
            "injection": f"{kind}@rank1:step3",
            "phase": KINDS[kind].phase.name,
        }
    ]


@pytest.mark.usefixtures("deeds")
def test_another_rank_is_not_hurt(log: Log) -> None:
    """Only the one addressed."""
    for rank in (0, 2):
        steps(make(log, "kill@rank1:step3", "extra@rank1:step4", rank=rank), 1, 6)
    assert log.lines == []


@pytest.mark.usefixtures("deeds")
def test_it_comes_once_though_the_phase_comes_twice(log: Log) -> None:
    """A phase may be entered several times in a step, and a later call counts its steps from 1 again."""
    injector = make(log, "slow@rank1:step3")
    steps(injector, 1, 4)
    injector.prepare(alone)
    steps(injector, 1, 4)
    assert len(log.records) == 1


@pytest.mark.usefixtures("deeds")
def test_what_fired_in_an_earlier_attempt_does_not_come_again(log: Log) -> None:
    """However the attempt goes over the same step."""
    steps(make(log, "kill@rank1:step3", fired={"kill@rank1:step3"}), 1, 5)
    assert log.lines == []


@pytest.mark.usefixtures("deeds")
def test_a_step_that_was_passed_is_passed(log: Log) -> None:
    """A run that goes on from step 5 does not hurt itself at step 6 for what was meant for step 3."""
    steps(make(log, "kill@rank1:step3"), 5, 8)
    assert log.lines == []


@pytest.mark.usefixtures("deeds")
@pytest.mark.parametrize("phase", ["checkpoint", "eval", "idle"])
def test_what_follows_a_step_belongs_to_it(log: Log, phase: str) -> None:
    """checkpoint-4 is written when step 5 would be next."""
    injector = make(log, f"hang@rank1:step4:phase={phase}")
    injector.on_phase(Phase[phase], 4)
    assert log.lines == []
    injector.on_phase(Phase[phase], 5)
    assert len(log.records) == 1


@pytest.mark.usefixtures("deeds")
def test_what_takes_effect_later_comes_first(log: Log) -> None:
    """A rank that hangs can no longer be told to ignore SIGTERM."""
    injector = make(log, "data@rank1:step2", "ignore-term@rank1:step2", "exit-hang@rank1:step2")
    steps(injector, 1, 2)
    assert [record["kind"] for record in log.records] == ["ignore-term", "exit-hang", "data"]


@pytest.mark.usefixtures("deeds")
@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "mismatch-group", "skip"])
@pytest.mark.parametrize("phase", ["reward", "forward_backward", "vote"])
def test_all_ranks_call_the_same_until_one_departs(log: Log, kind: str, phase: str) -> None:
    """Once a step from the second on, and never again after."""
    text = f"{kind}@rank1:step5" + (f":phase={phase}" if phase != "forward_backward" else "")
    steps(make(log, text, rank=0), 1, 8)
    assert log.lines == ["common on 0"] * 4  # steps 2, 3, 4, and 5 where rank 1 departs
    log.lines.clear()
    steps(make(log, text, rank=1), 1, 8)
    assert log.lines == [*["common on 1"] * 3, "written", "on disk", f"{text} on 1"]


@pytest.mark.usefixtures("deeds")
@pytest.mark.parametrize("step", [1, 2])
def test_an_early_departure_has_no_history(log: Log, step: int) -> None:
    """Nobody could say then which rank departed."""
    steps(make(log, f"skip@rank1:step{step}", rank=0), 1, 6)
    assert log.lines == ["common on 0"]


@pytest.mark.usefixtures("deeds")
def test_an_extra_call_has_no_common_one(log: Log) -> None:
    """The others never call it."""
    steps(make(log, "extra@rank1:step5", rank=0), 1, 8)
    assert log.lines == []


@pytest.mark.usefixtures("deeds")
def test_ranks_make_equally_many_calls_with_several_departures(log: Log) -> None:
    """Two departures in one phase share the history, else it would hang a rank by itself."""
    texts = ["mismatch-shape@rank1:step4", "skip@rank0:step6", "extra@rank2:step5"]
    calls = []
    for rank in (0, 1, 2):
        log.lines.clear()
        steps(make(log, *texts, rank=rank), 1, 8)
        calls.append(sum("common" in line or "mismatch" in line for line in log.lines))
    assert calls == [4, 5, 5]  # steps 2 to 6; rank 0 leaves the last one out


@pytest.mark.usefixtures("deeds")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_departure_has_no_second_call(log: Log, rank: int) -> None:
    """A phase entered again after the departure must not make a call for the next one: it would blame the wrong rank."""
    injector = make(log, "skip@rank1:step5:phase=reward", "skip@rank1:step7:phase=reward", rank=rank)
    steps(injector, 5, 5)
    assert [line for line in log.lines if "common" in line] == ["common on 0"] * (rank == 0)


@pytest.mark.usefixtures("deeds")
def test_ranks_agree_on_what_has_fired(log: Log) -> None:
    """One that knows it from its node's journal is enough; the list is gone through in one order everywhere."""
    asked: list[int] = []

    def other_rank_knows_the_second(number: int) -> int:
        asked.append(number)
        return max(number, [0, 1, 0][len(asked) - 1])

    injector = make(log, "skip@rank0:step5", "skip@rank0:step6", "slow@rank1:step4")
    injector.prepare(other_rank_knows_the_second)
    assert asked == [0, 0, 0]
    steps(injector, 1, 8)
    assert [line for line in log.lines if "common" in line] == ["common on 1"] * 4
    asked_again: list[int] = []
    injector.prepare(lambda number: (asked_again.append(number), number)[1])
    assert asked_again == [1, 1, 1]


def test_a_run_too_small_is_told_in_the_rank_too(log: Log) -> None:
    """Where the number of ranks is known for certain."""
    with pytest.raises(ConfigError, match="there is no rank 1"):
        make(log, "kill@rank1:step3", rank=0, world_size=1)


@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "skip", "extra"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_without_a_process_group_is_refused(log: Log, kind: str, rank: int) -> None:
    """On the rank it addresses; of the others, those that would take part."""
    injector = make(log, f"{kind}@rank1:step1", rank=rank)
    if kind == "extra" and rank == 0:
        steps(injector, 1, 1)
        return
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        steps(injector, 1, 1)


def test_the_exception_names_its_injection(log: Log) -> None:
    """In the place where the user's own would be raised."""
    with pytest.raises(InjectedFault, match=r"exception@rank1:step2") as caught:
        steps(make(log, "exception@rank1:step2"), 1, 3)
    assert caught.traceback[-1].name == "_raise"


def test_leaving_looks_like_a_finished_script(log: Log) -> None:
    """`sys.exit(0)`."""
    with pytest.raises(SystemExit) as caught:
        steps(make(log, "exit@rank1:step2"), 1, 3)
    assert caught.value.code == 0


def test_a_short_fault_ends_by_itself(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is the one that was asked for."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    texts = [
        "hang@rank1:step1:seconds=5", "slow@rank1:step1", "data@rank1:step1:seconds=7",
        "checkpoint@rank1:step1:seconds=8", "lock@rank1:step1:seconds=0.001",
    ]  # fmt: skip
    injector = make(log, *texts)
    steps(injector, 1, 1)
    injector.on_phase(Phase.checkpoint, 2)
    assert slept == [7.0, 5.0, 1.0, 8.0]
    assert len(log.records) == 5


class _EnoughError(Exception):
    """Ends a sleep that does not end."""


@pytest.mark.parametrize("kind", ["hang", "data"])
def test_a_hang_without_a_length_does_not_end(log: Log, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One sleep after another."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 50:
            raise _EnoughError

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(_EnoughError):
        steps(make(log, f"{kind}@rank1:step1"), 1, 1)


def test_returning_early_stops_this_ranks_training(log: Log) -> None:
    """At the end of the step, through the trainer's own switch, which survives the step's own resets."""
    from transformers import TrainerControl

    injector = make(log, "return@rank1:step2")
    trainer = types.SimpleNamespace(control=TrainerControl())
    with injector.attached(trainer):
        steps(injector, 1, 1)
        assert not trainer.control.should_training_stop
        steps(injector, 2, 2)
        trainer.control._new_step()
        trainer.control._new_epoch()
        assert trainer.control.should_training_stop


class Generating:
    """A trainer whose generation calls the model, as TRL's does, and marks its phase."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.injector: Injector | None = None
        self.step = 0

    def _generate(self, passes: int) -> str:
        assert self.injector is not None
        self.injector.on_phase(Phase.generate, self.step)
        for _ in range(passes):
            self.model(torch.ones(1))
        if passes == 3:
            raise RuntimeError("out of luck")
        return "done"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept, without sleeping."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("passes", [2, 3])
def test_generation_is_slow_in_its_step_only(log: Log, slept: list[float], passes: int) -> None:
    """A forward pass before, after (scoring) or in another step is not touched, and a failure leaves nothing behind."""
    trainer = Generating()
    injector = trainer.injector = make(log, "slow-generation@rank1:step2:seconds=0.5")
    with injector.attached(trainer):
        trainer.step = 1
        assert trainer._generate(2) == "done"
        assert slept == []
        trainer.step = 2
        if passes == 3:
            with pytest.raises(RuntimeError, match="out of luck"):
                trainer._generate(3)
        else:
            trainer._generate(2)
        trainer.model(torch.ones(1))
        assert slept == [0.5] * passes
        trainer.step = 3
        trainer._generate(2)
        assert slept == [0.5] * passes
    assert "_generate" not in vars(trainer)


def test_a_trainer_is_left_alone_without_need(log: Log) -> None:
    """Its generation is wrapped for slow generation only."""
    trainer = Generating()
    with make(log, "kill@rank1:step2").attached(trainer):
        assert "_generate" not in vars(trainer)


def test_the_exit_handler_hangs_at_the_exit(
    log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """Not before."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    steps(make(log, "exit-hang@rank1:step2:seconds=4"), 1, 3)
    assert slept == []
    handlers[0]()
    assert slept == [4.0]


def test_a_rank_that_ignores_sigterm_ignores_it(log: Log) -> None:
    """From that step on."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        steps(make(log, "ignore-term@rank1:step2"), 1, 2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_random_state_is_untouched(log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """A run that healed ends with the weights of one that was never hurt."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    before = torch.random.get_rng_state()
    module._ones(3)
    steps(make(log, "slow@rank1:step2", "hang@rank1:step3:seconds=1"), 1, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
