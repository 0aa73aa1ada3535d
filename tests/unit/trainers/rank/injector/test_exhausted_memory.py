"""Memory runs out in the phase, and above the size, that an injection names."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from support.builders.trainers.injections import Log, alone

from grpo_run.runtime.launch.injections import parse_all
from grpo_run.runtime.rank.injector import Injector
from grpo_run.watchdog.memory.error_patterns import recognize
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


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
    assert [record.injection for record in log.records] == [
        str(parse_all([f"oom@rank0:step2:phase={phase}"])[0])
    ]
    assert log.records[0].phase == phase
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
    assert log.records[0].phase == MemoryPhase.backward.name


@pytest.mark.parametrize("phase", ["generate", "score"])
def test_memory_runs_out_in_the_parts_of_a_hand_written_loop(log: Log, phase: str) -> None:
    """The board shows one phase for its whole body: what generates and what records no gradients is told by
    itself.
    """
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
