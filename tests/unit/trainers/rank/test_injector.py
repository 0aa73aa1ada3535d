"""When faults are injected, in which order and how often, and what the other ranks do meanwhile."""

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
from grpo_run.runtime.launch.injections.kinds import KINDS
from grpo_run.runtime.launch.injections.parsing import parse_all
from grpo_run.trainers.rank.injected import faults, injector
from grpo_run.trainers.rank.injected.faults import FAULTS, InjectedFault
from grpo_run.trainers.rank.injected.injector import Injector
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.out_of_memory.spellings import recognize


class Log:
    """A journal that also records the order of everything that happens."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append("journaled")
        self.records.append({"event": event, **fields})

    def sync(self) -> None:
        self.lines.append("on disk")


@pytest.fixture
def log() -> Log:
    """An empty log."""
    return Log()


@pytest.fixture
def logged_faults(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Replace the faults and the common collective by a line in the log."""
    for name in FAULTS:
        monkeypatch.setitem(
            FAULTS, name, lambda context, injection: log.lines.append(f"{injection} on {context.rank}")
        )
    monkeypatch.setattr(
        injector, "common_collective", lambda context: log.lines.append(f"common on {context.rank}")
    )


def make(
    log: Log, *texts: str, rank: int = 1, world_size: int = 3, fired: set[str] | None = None
) -> Injector:
    """Return the injector of one rank."""
    return Injector(parse_all(texts), rank=rank, world_size=world_size, journal=log, fired=fired or set())


def alone(number: int) -> int:
    """Return the maximum over one rank."""
    return number


STEP = [
    Phase.data, Phase.forward_backward, Phase.score, Phase.generate, Phase.reward, Phase.reward, Phase.vote,
    Phase.optimizer, Phase.vote,
]  # fmt: skip
"""The phases of a GRPO step, in order. A reward function is a phase inside the phase of all rewards."""


def steps(injector: Injector, first: int, last: int) -> None:
    """Enter the phases of whole steps, as a guarded trainer does."""
    for step in range(first, last + 1):
        for phase in STEP:
            injector.on_phase(phase, step)


def test_each_kind_has_its_own_function() -> None:
    """A stack then names the kind."""
    assert list(FAULTS) == list(KINDS)
    assert len({function.__name__ for function in FAULTS.values()}) == len(KINDS)


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in KINDS
        if not KINDS[kind].common and kind != "checkpoint" and not KINDS[kind].takes_rows
    ],
)
def test_a_fault_is_on_disk_before_it_happens(log: Log, kind: str) -> None:
    """A killed rank cannot journal it, and a fault without a record would happen again."""
    steps(make(log, f"{kind}@rank1:step3"), 1, 5)
    assert log.lines == ["journaled", "on disk", f"{kind}@rank1:step3 on 1"]
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


@pytest.mark.usefixtures("logged_faults")
def test_other_ranks_are_not_faulted(log: Log) -> None:
    """The injection names one rank."""
    for rank in (0, 2):
        steps(make(log, "kill@rank1:step3", "extra@rank1:step4", rank=rank), 1, 6)
    assert log.lines == []


@pytest.mark.usefixtures("logged_faults")
def test_a_fault_happens_once_although_its_phase_repeats(log: Log) -> None:
    """A phase may be entered several times per step, and a second call counts its steps from 1 again."""
    injector = make(log, "slow@rank1:step3")
    steps(injector, 1, 4)
    injector.prepare(alone)
    steps(injector, 1, 4)
    assert len(log.records) == 1


@pytest.mark.usefixtures("logged_faults")
def test_a_fault_of_an_earlier_attempt_does_not_repeat(log: Log) -> None:
    """The attempt repeats the step without the fault."""
    steps(make(log, "kill@rank1:step3", fired={"kill@rank1:step3"}), 1, 5)
    assert log.lines == []


@pytest.mark.usefixtures("logged_faults")
def test_a_fault_of_a_passed_step_does_not_happen(log: Log) -> None:
    """A run that resumes from step 5 is not faulted at step 6 for step 3."""
    steps(make(log, "kill@rank1:step3"), 5, 8)
    assert log.lines == []


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize("phase", ["checkpoint", "eval", "idle"])
def test_phases_after_a_step_belong_to_it(log: Log, phase: str) -> None:
    """checkpoint-4 is written while step 5 is the next step."""
    injector = make(log, f"hang@rank1:step4:phase={phase}")
    injector.on_phase(Phase[phase], 4)
    assert log.lines == []
    injector.on_phase(Phase[phase], 5)
    assert len(log.records) == 1


@pytest.mark.usefixtures("logged_faults")
def test_faults_that_take_effect_later_are_armed_first(log: Log) -> None:
    """A rank that hangs can no longer ignore SIGTERM."""
    injector = make(log, "data@rank1:step2", "ignore-term@rank1:step2", "exit-hang@rank1:step2")
    steps(injector, 1, 2)
    assert [record["kind"] for record in log.records] == ["ignore-term", "exit-hang", "data"]


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "mismatch-group", "skip"])
@pytest.mark.parametrize("phase", ["reward", "forward_backward", "vote"])
def test_all_ranks_make_the_same_calls_until_one_deviates(log: Log, kind: str, phase: str) -> None:
    """Once per step from the second step on, and not after the deviation."""
    text = f"{kind}@rank1:step5" + (f":phase={phase}" if phase != "forward_backward" else "")
    steps(make(log, text, rank=0), 1, 8)
    assert log.lines == ["common on 0"] * 4  # steps 2, 3, 4, and 5 where rank 1 departs
    log.lines.clear()
    steps(make(log, text, rank=1), 1, 8)
    assert log.lines == [*["common on 1"] * 3, "journaled", "on disk", f"{text} on 1"]


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize("step", [1, 2])
def test_an_early_deviation_has_no_earlier_calls(log: Log, step: int) -> None:
    """Without them, the deviating rank cannot be identified."""
    steps(make(log, f"skip@rank1:step{step}", rank=0), 1, 6)
    assert log.lines == ["common on 0"]


@pytest.mark.usefixtures("logged_faults")
def test_an_extra_call_has_no_common_collective(log: Log) -> None:
    """The other ranks never make it."""
    steps(make(log, "extra@rank1:step5", rank=0), 1, 8)
    assert log.lines == []


@pytest.mark.usefixtures("logged_faults")
def test_ranks_make_equally_many_calls_with_several_deviations(log: Log) -> None:
    """Deviations in one phase share their common collectives.

    Otherwise a rank would hang without any fault.
    """
    texts = ["mismatch-shape@rank1:step4", "skip@rank0:step6", "extra@rank2:step5"]
    calls = []
    for rank in (0, 1, 2):
        log.lines.clear()
        steps(make(log, *texts, rank=rank), 1, 8)
        calls.append(sum("common" in line or "mismatch" in line for line in log.lines))
    assert calls == [4, 5, 5]  # steps 2 to 6; rank 0 leaves the last one out


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_with_a_deviation_has_no_second_call(log: Log, rank: int) -> None:
    """A call at a later entry of the phase would be attributed to the wrong rank."""
    injector = make(log, "skip@rank1:step5:phase=reward", "skip@rank1:step7:phase=reward", rank=rank)
    steps(injector, 5, 5)
    assert [line for line in log.lines if "common" in line] == ["common on 0"] * (rank == 0)


@pytest.mark.usefixtures("logged_faults")
def test_ranks_agree_on_what_has_fired(log: Log) -> None:
    """One rank that knows it from its node's journal is enough. All ranks vote in the same order."""
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


def test_an_injection_into_a_missing_rank_is_an_error(log: Log) -> None:
    """The rank checks again, because only here the world size is certain."""
    with pytest.raises(ConfigError, match="there is no rank 1"):
        make(log, "kill@rank1:step3", rank=0, world_size=1)


@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "skip", "extra"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_without_a_process_group_is_an_error(log: Log, kind: str, rank: int) -> None:
    """On the rank that the injection names, and on the ranks that would take part."""
    injector = make(log, f"{kind}@rank1:step1", rank=rank)
    if kind == "extra" and rank == 0:
        steps(injector, 1, 1)
        return
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        steps(injector, 1, 1)


def test_the_exception_names_its_injection(log: Log) -> None:
    """It is raised where the user's own exception would be."""
    with pytest.raises(InjectedFault, match=r"exception@rank1:step2") as caught:
        steps(make(log, "exception@rank1:step2"), 1, 3)
    assert caught.traceback[-1].name == "_raise"


def test_an_injected_exit_has_code_0(log: Log) -> None:
    """Like a script that calls `sys.exit(0)`."""
    with pytest.raises(SystemExit) as caught:
        steps(make(log, "exit@rank1:step2"), 1, 3)
    assert caught.value.code == 0


def test_a_fault_with_a_length_ends(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts the requested number of seconds."""
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


class _EndSleep(Exception):
    """Ends an endless sleep."""


@pytest.mark.parametrize("kind", ["hang", "data"])
def test_a_hang_without_a_length_does_not_end(log: Log, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It sleeps repeatedly."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 50:
            raise _EndSleep

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(_EndSleep):
        steps(make(log, f"{kind}@rank1:step1"), 1, 1)


def test_an_early_return_ends_training_on_this_rank(log: Log) -> None:
    """At the end of the step, through the trainer's own flag, which is not reset between steps."""
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
    """A trainer whose generation marks its phase and calls the model, as TRL's does."""

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
    """The lengths of all sleeps, which are skipped."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("passes", [2, 3])
def test_generation_is_slow_in_its_step_only(log: Log, slept: list[float], passes: int) -> None:
    """Other forward passes keep their speed, also if generation fails."""
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


def test_generation_is_wrapped_only_if_it_will_be_slowed(log: Log) -> None:
    """Other injections do not wrap the trainer."""
    trainer = Generating()
    with make(log, "kill@rank1:step2").attached(trainer):
        assert "_generate" not in vars(trainer)


def test_the_exit_handler_hangs_at_exit(
    log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """Registering it does not block."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    steps(make(log, "exit-hang@rank1:step2:seconds=4"), 1, 3)
    assert slept == []
    handlers[0]()
    assert slept == [4.0]


def test_a_rank_ignores_sigterm_from_the_step_on(log: Log) -> None:
    """The fault changes the signal's disposition."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        steps(make(log, "ignore-term@rank1:step2"), 1, 2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_random_state_is_unchanged(log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """A recovered run ends with the weights of a run without faults."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    before = torch.random.get_rng_state()
    faults._ones(3)
    steps(make(log, "slow@rank1:step2", "hang@rank1:step3:seconds=1"), 1, 4)
    assert torch.equal(torch.random.get_rng_state(), before)


class Board:
    """The open phases and the step in progress, as the slot has them."""

    def __init__(self) -> None:
        self.phases: tuple[Phase, ...] = ()
        self.step = 1


class GeneratingModel(torch.nn.Linear):
    """A model that generates by forward passes without gradients."""

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)  # type: ignore[no-any-return]


def pass_through(board: Board, model: torch.nn.Module, rows: int) -> None:
    """One micro-batch: forward and backward in the phase of both."""
    board.phases = (Phase.forward_backward,)
    model(torch.ones(rows, 2)).sum().backward()


@pytest.mark.parametrize("phase", ["generate", "score", "forward", "backward", "optimizer"])
def test_memory_runs_out_once_in_the_phase_that_is_named(log: Log, phase: str) -> None:
    """The message is torch's, so that it is classified as any other."""
    board = Board()
    injector = Injector(
        parse_all([f"oom@rank0:step2:phase={phase}"]), rank=0, world_size=1, journal=log,
        open_phases=lambda: board.phases, step=lambda: board.step,
    )  # fmt: skip
    model = GeneratingModel(2, 2)

    def score(inputs: object) -> None:
        board.phases = (Phase.forward_backward, Phase.score)
        trainer._generate([1, 2])
        board.phases = (Phase.forward_backward, Phase.score)

    def generate(prompts: object) -> None:
        board.phases = (Phase.forward_backward, Phase.score, Phase.generate)
        model.generate(torch.ones(3, 2))

    trainer = types.SimpleNamespace(
        model=model,
        control=types.SimpleNamespace(),
        args=types.SimpleNamespace(per_device_train_batch_size=4, use_vllm=False),
        _generate=generate,
        _generate_and_score_completions=score,
    )
    backward = torch.autograd.backward
    parts: dict[str, Callable[[], object]] = {
        "score": lambda: trainer._generate_and_score_completions(None),
        "backward": lambda: pass_through(board, model, 4),
        "optimizer": lambda: injector.on_phase(Phase.optimizer, board.step),
    }
    parts |= {"generate": parts["score"], "forward": parts["backward"]}
    with injector.attached(trainer):
        for step in (1, 2, 3):
            board.step = step
            for name in ("score", "backward", "optimizer"):
                if step == 2 and parts[phase] is parts[name]:
                    with pytest.raises(torch.OutOfMemoryError) as raised:
                        parts[name]()
                    assert recognize(["torch.OutOfMemoryError"], str(raised.value)) is not None
                parts[name]()
    assert [record["injection"] for record in log.records] == [
        str(parse_all([f"oom@rank0:step2:phase={phase}"])[0])
    ]
    assert log.records[0]["phase"] == phase
    assert torch.autograd.backward is backward
    model.generate(torch.ones(9, 2))
    assert not model._forward_pre_hooks
    assert "generate" not in vars(model)


def test_memory_runs_out_until_the_micro_batch_is_small_enough(log: Log) -> None:
    """In every step from the named one on, and in every attempt."""
    board = Board()
    text = "oom@rank0:step2:phase=backward:rows=2"
    injector = Injector(
        parse_all([text]), rank=0, world_size=1, journal=log, fired={text},
        open_phases=lambda: board.phases, step=lambda: board.step,
    )  # fmt: skip
    model = torch.nn.Linear(2, 2)
    with injector.attached_to_loop(lambda: None, [model]):
        injector.prepare(alone)
        pass_through(board, model, 8)
        for board.step in (2, 3):
            for rows in (8, 4, 3):
                with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                    pass_through(board, model, rows)
            for rows in (2, 1):
                pass_through(board, model, rows)


def test_memory_runs_out_above_a_number_of_tokens_however_they_are_shared_among_rows(log: Log) -> None:
    """Rows times their length: the inputs have two tokens a row."""
    board = Board()
    injector = Injector(
        parse_all(["oom@rank0:step1:phase=backward:tokens=6"]), rank=0, world_size=1, journal=log,
        open_phases=lambda: board.phases, step=lambda: board.step,
    )  # fmt: skip
    with injector.attached_to_loop(lambda: None, [model := torch.nn.Linear(2, 2)]):
        pass_through(board, model, 3)
        with pytest.raises(torch.OutOfMemoryError):
            pass_through(board, model, 4)
        pass_through(board, model, 3)


def test_nccl_reports_exhausted_memory_in_its_own_words(log: Log) -> None:
    """The same error class as that of a lost connection."""
    board = Board()
    injector = Injector(
        parse_all(["oom-nccl@rank0:step1"]), rank=0, world_size=1, journal=log,
        open_phases=lambda: board.phases, step=lambda: board.step,
    )  # fmt: skip
    with (
        injector.attached_to_loop(lambda: None, [model := torch.nn.Linear(2, 2)]),
        pytest.raises(torch.distributed.DistBackendError, match="Cuda failure 2 'out of memory'"),
    ):
        pass_through(board, model, 2)
    assert log.records[0]["phase"] == MemoryPhase.backward.name


@pytest.mark.parametrize("phase", ["generate", "score"])
def test_memory_runs_out_in_the_parts_of_a_hand_written_loop(log: Log, phase: str) -> None:
    """The board shows one phase for its whole body: what generates and what records no gradients is told by itself."""
    board = Board()
    injector = Injector(
        parse_all([f"oom@rank0:step1:phase={phase}:rows=2"]), rank=0, world_size=1, journal=log,
        open_phases=lambda: board.phases, step=lambda: board.step,
    )  # fmt: skip
    model = GeneratingModel(2, 2)
    with injector.attached_to_loop(lambda: None, [model]):
        board.phases = (Phase.forward_backward,)
        for rows in (2, 3):
            if phase == "score":
                model.generate(torch.ones(9, 2))
            else:
                model(torch.ones(9, 2))
            with torch.no_grad() if rows == 2 else pytest.raises(torch.OutOfMemoryError), torch.no_grad():
                model.generate(torch.ones(rows, 2)) if phase == "generate" else model(torch.ones(rows, 2))
