"""What ranks say about exhausted memory, and what is understood of it: the shell of transcripts."""

from __future__ import annotations

import signal
from dataclasses import asdict
from typing import Any

from grpo_run.watchdog.memory.error_patterns import needs_output, recognize, reported_in
from grpo_run.watchdog.memory.shortage import (
    Figures,
    MemoryPhase,
    described_in,
    line_of,
    memory_phase,
    read_figures,
    shortage_of,
    usage_in,
)
from grpo_run.watchdog.observation import Phase
from support.builders.watchdog.failed_ranks import make_error, make_exit

BASES = {
    "torch.OutOfMemoryError": "RuntimeError", "torch.cuda.OutOfMemoryError": "RuntimeError",
    "torch._C._OutOfMemoryError": "RuntimeError", "torch.AcceleratorError": "RuntimeError",
    "cupy.cuda.memory.OutOfMemoryError": "MemoryError",
    "torch.distributed.DistBackendError": "torch.distributed.DistError",
    "torch.distributed.DistError": "RuntimeError",
    "ray.exceptions.RayTaskError(OutOfMemoryError)": "torch.OutOfMemoryError",
    "numpy._core._exceptions._ArrayMemoryError": "MemoryError", "requests.exceptions.HTTPError": "OSError",
    "KeyError": "LookupError",
}  # fmt: skip
"""The class after each one in the order of its bases; that of all others is `Exception`."""
TEXTS = {
    "[nccl]": (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:77, unhandled cuda error (run with"
        " NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function"
        " failed.\nLast error:\n"
    ),
    "[worker]": (
        "Caught RuntimeError in pin memory thread for device 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "torch/utils/data/_utils/pin_memory.py", line 37, in do_one_step\n    data = pin_memory(data,'
        " device)\n"
    ),
    "[engine]": (
        "(EngineCore_DP0 pid=912) ERROR 08-22 10:00:00 [core.py:700] EngineCore failed to start.\n"
        "(EngineCore_DP0 pid=912) ERROR 08-22 10:00:00 [core.py:700]     self.model = self.model.to(device)\n"
    ),
}
"""The beginnings of long messages."""
DEAD = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
SITE = "/v/site-packages"
FRAMES = {
    "loss": (f"{SITE}/transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)"),
    "backward": (
        f"{SITE}/transformers/trainer.py",
        "training_step",
        "self.accelerator.backward(loss, **kwargs)",
    ),
    "engine": (
        f"{SITE}/torch/autograd/graph.py",
        "_engine_run_backward",
        "return Variable._execution_engine(",
    ),
    "model": (f"{SITE}/transformers/models/qwen2/modeling_qwen2.py", "forward", "x = self.mlp(x)"),
    "deepspeed": (f"{SITE}/deepspeed/runtime/engine.py", "step", "self._take_model_step(lr_kwargs)"),
    "adam": (f"{SITE}/torch/optim/adamw.py", "step", "state['exp_avg'] = torch.zeros_like("),
    "clip": (f"{SITE}/transformers/trainer.py", "_inner", "norm = self.accelerator.clip_grad_norm_("),
    "script": ("/home/u/train.py", "collect", "table = torch.empty(rows, device='cuda')"),
    "rollout": (f"{SITE}/trl/trainer/grpo_trainer.py", "_generate", "ids = self.model.generate(**inputs)"),
    "sampling": (f"{SITE}/transformers/generation/utils.py", "_sample", "outputs = self(**inputs)"),
    "load": (
        f"{SITE}/transformers/trainer.py",
        "_load_optimizer_and_scheduler",
        "self.optimizer.load_state_dict(",
    ),
    "own-backward": ("train.py", "<module>", "loss.backward()"),
    "own-generate": ("train.py", "<module>", "model.generate(**inputs)"),
    "generate-function": ("train.py", "generate", "logits = model(ids)"),
    "load-function": ("train.py", "_load_batch", "x = model(x)"),
}
"""Frames of tracebacks: file, function and source line."""
FROZEN = '  File "<frozen runpy>", line 88, in _run_code\n'
PLACE = ("/home/u/train.py", 7, "collect")


class ReportShell:
    """Messages, output and tracebacks; `\\n` is a line break."""

    def raised(self, kind: str, message: str = "") -> str:
        """What an exception of this class reports."""
        found = recognize(chain_of(kind), text_of(message))
        return "nothing" if found is None else f"{found.cause.name} by {found.source}: {found.text}"

    def figures(self, message: str) -> str:
        """The figures of a message, in bytes and in words."""
        found = read_figures(text_of(message))
        assert Figures.from_json(asdict(found)) == found
        known = [f"{name} {value}" for name, value in asdict(found).items() if value]
        return "\n".join(filter(None, [", ".join(known) or "none", found.request, found.usage]))

    def described(self, **fields: str) -> str:
        """A verdict of the allocator in the backward pass, in one row and by what was in use."""
        shortage: Any = {"memory": "GPU memory", "phase": "backward", "source": "allocator"}
        verdict = {"shortage": shortage | {name: int(value) for name, value in fields.items()}}
        return "\n".join(filter(None, [described_in(verdict), usage_in(verdict)]))

    def aborted(self, output: str) -> str:
        """What the output of an aborted rank explains."""
        return self._explained(make_exit(0, signal=signal.SIGABRT), output)

    def engine(self, output: str) -> str:
        """What the output of a rank explains whose engine has ended."""
        return self._explained(make_exit(0, error=make_error(type="RuntimeError", message=DEAD)), output)

    def reads_output(self, end: str) -> bool:
        """Whether the output of a rank counts that has ended so: an error, a signal or a code."""
        ends = {
            "error": {"error": make_error()},
            "signal": {"signal": signal.SIGKILL},
            "code": {"exit_code": 3},
        }
        return needs_output(make_exit(0, **ends[end]))

    def phase(self, phases: str, *frames: str, line: str = "") -> str:
        """The phase of memory, from the phases of the board, the outermost first, and a traceback.

        Args:
            line: `script` if the error was located in the script's own function.
        """
        known = None if phases == "unknown" else tuple(Phase[name] for name in phases.split(",") if name)
        return memory_phase(known, traceback_of(frames), *([PLACE] if line else [])).name

    def line(self, phase: str, *frames: str, known: str = "yes") -> str:
        """The line that is named."""
        return line_of(MemoryPhase[phase], traceback_of(frames), PLACE if known == "yes" else None) or "none"

    def _explained(self, exit: Any, output: str) -> str:
        assert needs_output(exit)
        error = reported_in(text_of(output), exit, 12.0)
        if error is None:
            return "nothing"
        shortage = shortage_of(error, None)
        assert shortage is not None
        kept = exit.error is not None and (error.traceback, error.wall_time) == (
            exit.error.traceback,
            exit.error.wall_time,
        )
        tried = f", tried {shortage.figures.tried_bytes}" if shortage.figures.tried_bytes else ""
        when = "its own traceback and time" if kept else f"at {error.wall_time:g} s"
        return f"{shortage.cause.name} by {shortage.source}{tried}: {error.type}, {when}"


def chain_of(kind: str) -> tuple[str, ...]:
    """A class with those that it is derived from."""
    own = kind if "." in kind else f"builtins.{kind}"
    return (own,) if kind == "Exception" else (own, *chain_of(BASES.get(kind, "Exception")))


def text_of(message: str) -> str:
    """The text that a word of a story stands for."""
    for name, text in TEXTS.items():
        message = message.replace(name, text)
    return message.replace("\\n", "\n")


def traceback_of(frames: tuple[str, ...]) -> str:
    """A traceback of these frames, the outermost first; `frozen` has no source line."""
    if not frames:
        return ""
    lines = "".join(
        FROZEN
        if name == "frozen"
        else f'  File "{FRAMES[name][0]}", line 7, in {FRAMES[name][1]}\n    {FRAMES[name][2]}\n'
        for name in frames
    )
    return f"Traceback (most recent call last):\n{lines}"
