"""Memory runs out in the phase, and above the size, that an injection names."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from support.builders.trainers.injections import InjectedRank, Log

from grpo_run.runtime.features.injections._injection import parse_all
from grpo_run.watchdog.memory.error_patterns import recognize
from grpo_run.watchdog.observation import Phase


class GeneratingModel(torch.nn.Linear):
    """A model that generates by forward passes without gradients."""

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)  # type: ignore[no-any-return]


def pass_through(rank: InjectedRank, model: torch.nn.Module, rows: int) -> None:
    """One micro-batch: forward and backward in the phase of both."""
    rank.open_phases = (Phase.forward_backward,)
    model(torch.ones(rows, 2)).sum().backward()


@pytest.mark.parametrize("phase", ["generate", "score", "forward", "backward", "optimizer"])
def test_memory_runs_out_once_in_the_phase_that_is_named(log: Log, phase: str) -> None:
    """The message is torch's, so that it is classified as any other."""
    rank = InjectedRank(log, f"oom@rank0:step2:phase={phase}", rank=0, world_size=1)
    model = GeneratingModel(2, 2)

    def score(inputs: object) -> None:
        rank.open_phases = (Phase.forward_backward, Phase.score)
        trainer._generate([1, 2])
        rank.open_phases = (Phase.forward_backward, Phase.score)

    def generate(prompts: object) -> None:
        rank.open_phases = (Phase.forward_backward, Phase.score, Phase.generate)
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
        "backward": lambda: pass_through(rank, model, 4),
        "optimizer": lambda: rank.enter(Phase.optimizer, rank.step + 1),
    }
    parts |= {"generate": parts["score"], "forward": parts["backward"]}
    with rank.call(model, trainer=trainer):
        for step in (1, 2, 3):
            rank.step = step - 1
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
    text = "oom@rank0:step2:phase=backward:rows=2"
    rank = InjectedRank(log, text, rank=0, world_size=1, fired={text})
    model = torch.nn.Linear(2, 2)
    with rank.call(model):
        pass_through(rank, model, 8)
        for rank.step in (1, 2):
            for rows in (8, 4, 3):
                with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                    pass_through(rank, model, rows)
            for rows in (2, 1):
                pass_through(rank, model, rows)


def test_memory_runs_out_above_a_number_of_tokens_however_they_are_shared_among_rows(log: Log) -> None:
    """Rows times their length: the inputs have two tokens a row."""
    rank = InjectedRank(log, "oom@rank0:step1:phase=backward:tokens=6", rank=0, world_size=1)
    with rank.call(model := torch.nn.Linear(2, 2)):
        pass_through(rank, model, 3)
        with pytest.raises(torch.OutOfMemoryError):
            pass_through(rank, model, 4)
        pass_through(rank, model, 3)


@pytest.mark.parametrize("phase", ["generate", "score"])
def test_memory_runs_out_in_the_parts_of_a_hand_written_loop(log: Log, phase: str) -> None:
    """The board shows one phase for its whole body: what generates and what records no gradients is told by
    itself.
    """
    rank = InjectedRank(log, f"oom@rank0:step1:phase={phase}:rows=2", rank=0, world_size=1)
    model = GeneratingModel(2, 2)
    with rank.call(model):
        rank.open_phases = (Phase.forward_backward,)
        for rows in (2, 3):
            if phase == "score":
                model.generate(torch.ones(9, 2))
            else:
                model(torch.ones(9, 2))
            with torch.no_grad() if rows == 2 else pytest.raises(torch.OutOfMemoryError), torch.no_grad():
                model.generate(torch.ones(rows, 2)) if phase == "generate" else model(torch.ones(rows, 2))
