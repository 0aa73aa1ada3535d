"""The phase that ran out of memory, from the board's phases and a traceback."""

from __future__ import annotations

import traceback

import pytest
import torch

from grpo_run.watchdog.memory.shortage import MemoryPhase, line_of, memory_phase
from grpo_run.watchdog.observation import Phase

STEP = (Phase.forward_backward,)


def frames(*lines: tuple[str, str, str]) -> str:
    """A traceback with these files, functions and source lines, the outermost first."""
    return "Traceback (most recent call last):\n" + "".join(
        f'  File "{file}", line 7, in {function}\n    {source}\n' for file, function, source in lines
    )


TRAINER = (
    "/v/site-packages/transformers/trainer.py",
    "training_step",
    "loss = self.compute_loss(model, inputs)",
)
BACKWARD = (
    "/v/site-packages/transformers/trainer.py",
    "training_step",
    "self.accelerator.backward(loss, **kwargs)",
)
ENGINE = (
    "/v/site-packages/torch/autograd/graph.py",
    "_engine_run_backward",
    "return Variable._execution_engine(",
)
RECOMPUTED = ("/v/site-packages/transformers/models/qwen2/modeling_qwen2.py", "forward", "x = self.mlp(x)")
DEEPSPEED = ("/v/site-packages/deepspeed/runtime/engine.py", "step", "self._take_model_step(lr_kwargs)")
ADAM = ("/v/site-packages/torch/optim/adamw.py", "step", "state['exp_avg'] = torch.zeros_like(")
CLIP = ("/v/site-packages/transformers/trainer.py", "_inner", "norm = self.accelerator.clip_grad_norm_(")
SCRIPT = ("/home/u/train.py", "collect", "table = torch.empty(rows, device='cuda')")
ROLLOUT = ("/v/site-packages/trl/trainer/grpo_trainer.py", "_generate", "ids = self.model.generate(**inputs)")
SAMPLING = ("/v/site-packages/transformers/generation/utils.py", "_sample", "outputs = self(**inputs)")
PLACE = ("/home/u/train.py", 7, "collect")
LOAD = (
    "/v/site-packages/transformers/trainer.py",
    "_load_optimizer_and_scheduler",
    "self.optimizer.load_state_dict(",
)


@pytest.mark.parametrize(
    ("phases", "text", "phase"),
    [
        ((*STEP, Phase.score, Phase.generate), frames(TRAINER), MemoryPhase.generate),
        ((Phase.eval, Phase.score, Phase.generate), frames(TRAINER), MemoryPhase.generate),
        ((*STEP, Phase.score), frames(TRAINER), MemoryPhase.score),
        ((*STEP, Phase.score, Phase.reward), frames(TRAINER), MemoryPhase.reward),
        ((Phase.eval, Phase.score), frames(TRAINER), MemoryPhase.evaluate),
        ((Phase.eval,), frames(TRAINER), MemoryPhase.evaluate),
        ((*STEP, Phase.callback), frames(BACKWARD, ENGINE), MemoryPhase.callback),
        (STEP, frames(TRAINER, RECOMPUTED), MemoryPhase.forward),
        (STEP, frames(BACKWARD), MemoryPhase.backward),
        (STEP, frames(BACKWARD, ENGINE, RECOMPUTED), MemoryPhase.backward),
        (STEP, frames(("train.py", "<module>", "loss.backward()")), MemoryPhase.backward),
        (
            STEP,
            frames(("train.py", "<module>", "model.generate(**inputs)"), RECOMPUTED),
            MemoryPhase.generate,
        ),
        (STEP, frames(("train.py", "generate", "logits = model(ids)"), RECOMPUTED), MemoryPhase.generate),
        (STEP, frames(BACKWARD, DEEPSPEED), MemoryPhase.optimizer),
        (STEP, frames(CLIP), MemoryPhase.optimizer),
        (STEP, frames(("train.py", "_load_batch", "x = model(x)")), MemoryPhase.forward),
        ((Phase.optimizer,), frames(ADAM), MemoryPhase.optimizer),
        ((Phase.optimizer,), "", MemoryPhase.optimizer),
        ((Phase.checkpoint,), "", MemoryPhase.save),
        ((Phase.checkpoint,), frames(LOAD), MemoryPhase.load),
        ((Phase.startup,), "", MemoryPhase.load),
        ((Phase.idle,), frames(LOAD, ADAM), MemoryPhase.load),
        ((Phase.startup,), frames(ADAM, LOAD), MemoryPhase.load),
        (None, "", MemoryPhase.unknown),
        ((Phase.data,), frames(TRAINER), MemoryPhase.unknown),
        ((Phase.vote,), "", MemoryPhase.unknown),
    ],
)
def test_the_phase_follows_from_the_board_and_the_traceback(
    phases: tuple[Phase, ...] | None, text: str, phase: MemoryPhase
) -> None:
    """The board's phase decides where it is fine enough, the innermost telling frame where it is not."""
    assert memory_phase(phases, text) is phase


@pytest.mark.parametrize(
    ("phases", "text", "phase"),
    [
        ((Phase.startup,), frames(SCRIPT), MemoryPhase.script),
        ((Phase.idle,), frames(SCRIPT, RECOMPUTED), MemoryPhase.script),
        ((Phase.idle,), frames(SCRIPT, SAMPLING), MemoryPhase.script),
        ((Phase.startup,), frames(SCRIPT, TRAINER), MemoryPhase.load),
        ((Phase.startup,), frames(SCRIPT, LOAD), MemoryPhase.load),
        ((Phase.data,), frames(TRAINER, SCRIPT), MemoryPhase.script),
        ((Phase.data,), frames(SCRIPT, TRAINER), MemoryPhase.unknown),
        ((Phase.generate,), frames(ROLLOUT, SCRIPT), MemoryPhase.script),
        ((Phase.generate,), frames(ROLLOUT, SCRIPT, SAMPLING), MemoryPhase.generate),
        ((Phase.generate,), frames(SCRIPT, ROLLOUT, SAMPLING), MemoryPhase.generate),
        ((Phase.generate,), frames(SCRIPT, ROLLOUT), MemoryPhase.generate),
        ((*STEP,), frames(TRAINER, SCRIPT), MemoryPhase.forward),
        ((Phase.optimizer,), frames(TRAINER, SCRIPT), MemoryPhase.optimizer),
    ],
)  # fmt: skip
def test_the_scripts_own_code_is_told_from_a_trainers(
    phases: tuple[Phase, ...], text: str, phase: MemoryPhase
) -> None:
    """In a phase whose sizes a plan changes, the line does not matter: what it allocates may depend on
    them.
    """
    assert memory_phase(phases, text, PLACE) is phase


def test_frames_without_a_source_line_hide_no_other_frame() -> None:
    """runpy is frozen: its frames are directly above the script's."""
    frozen = '  File "<frozen runpy>", line 88, in _run_code\n'
    text = (
        f"Traceback (most recent call last):\n{frozen}{frozen}{frozen}{frames(SCRIPT).partition(chr(10))[2]}"
    )
    assert memory_phase((Phase.startup,), text, PLACE) is MemoryPhase.script
    assert line_of(MemoryPhase.forward, text, PLACE) == "/home/u/train.py:7"


@pytest.mark.parametrize(
    ("phase", "text", "line"),
    [
        (MemoryPhase.forward, frames(TRAINER, SCRIPT), "/home/u/train.py:7"),
        (MemoryPhase.forward, frames(SCRIPT, TRAINER), ""),
        (MemoryPhase.reward, frames(SCRIPT, RECOMPUTED), "/home/u/train.py:7"),
    ],
)
def test_a_line_is_named_where_the_script_itself_has_asked_for_the_memory(
    phase: MemoryPhase, text: str, line: str
) -> None:
    """A line of a trainer allocates for many layers, and fails again at a later one after a change that has
    helped.
    """
    assert line_of(phase, text, PLACE) == line
    assert line_of(phase, text, None) == ""


def test_a_real_backward_pass_is_told_from_a_forward_pass() -> None:
    """torch's own frames, whatever this release calls them."""

    def fail(gradient: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(fail)
    run = loss.backward
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run()
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.backward

    class Model(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            fail(None)
            return value

    with pytest.raises(torch.OutOfMemoryError) as raised:
        Model()(weight)
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.forward


def test_a_real_optimizer_step_is_told_from_a_backward_pass() -> None:
    """The board may still show the phase of both passes, as under DeepSpeed."""

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("CUDA out of memory.")

    weight = torch.ones(3, requires_grad=True)
    run = Failing([weight]).step
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run()
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.optimizer
