"""The phase of a step that ran out of memory, finer than the phases on the board. Called by `shortage.py`. Pure.

On the board forward and backward passes are one phase, and a hand-written loop marks generation as a part of it. The
traceback tells them apart: by functions of torch, transformers and DeepSpeed, and by lines that call them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from grpo_run.watchdog.observation import Phase


class MemoryPhase(str, Enum):
    """What a rank was doing when memory was exhausted, as far as it decides what can lower the peak."""

    generate = "generate"
    """Generation of completions, also by vLLM in the rank."""
    score = "score"
    """What TRL computes of a rollout without gradients, such as log-probabilities."""
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    """The optimizer's step, and the clipping of gradients before it."""
    save = "save"
    load = "load"
    """Everything before the first step: weights, optimizer, checkpoint."""
    evaluate = "evaluate"
    """An evaluation, whose batches no plan changes."""
    unknown = "unknown"
    """Anything else: a reward function, a callback."""

    def __str__(self) -> str:
        return self.value


_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]*)", line \d+, in (?P<function>\S+)\n(?P<source>.*)$', re.MULTILINE
)
_Markers = tuple[tuple[MemoryPhase, str, str, str], ...]
_LOADING: _Markers = (
    (
        MemoryPhase.load,
        r"",
        r"load_state_dict|from_pretrained|_load_\w+|load_checkpoint",
        r"\bload_state_dict\(",
    ),
)
_OF_STEPS: _Markers = (
    (MemoryPhase.backward, r"", r"backward|_engine_run_backward", r"\.backward\(|\bautograd\.grad\("),
    (MemoryPhase.optimizer, r"/torch/optim/|/torch/nn/utils/clip_grad\.py$|/bitsandbytes/optim/|/deepspeed/ops/adam/", r".*", r""),
    (MemoryPhase.optimizer, r"/deepspeed/runtime/", r"step|_take_model_step", r""),
    (MemoryPhase.optimizer, r"", r"", r"\boptimizer\w*\.step\(|\bclip_grad_(?:norm|value)_?\("),
    (MemoryPhase.generate, r"/vllm/", r".*", r""),
    (MemoryPhase.generate, r"/transformers/generation/", r".*", r""),
    (MemoryPhase.generate, r"", r"_?generate", r"\.generate\("),
)  # fmt: skip
"""Phase, and patterns of a file, of a function in such a file, and of a line that calls it; "" matches no line or function.
A frame shows the phase if file and function match, or its line does."""
_FORWARD = re.compile(r", in (?:_call_impl|forward)$", re.MULTILINE)


def memory_phase(phases: Sequence[Phase] | None, traceback: str) -> MemoryPhase:
    """Return in which phase memory was exhausted.

    Args:
        phases: that were open, the outermost first; None if the rank has marked none.
        traceback: of the exception, as Python prints it.
    """
    innermost = phases[-1] if phases else None
    if innermost is Phase.generate:
        return MemoryPhase.generate
    if innermost in (Phase.reward, Phase.callback):
        return MemoryPhase.unknown
    if phases and Phase.eval in phases:
        return MemoryPhase.evaluate
    match innermost:
        case Phase.score:
            return MemoryPhase.score
        case Phase.forward_backward:
            return _innermost_shown(traceback, _OF_STEPS) or MemoryPhase.forward
        case Phase.optimizer:
            return _innermost_shown(traceback, _OF_STEPS) or MemoryPhase.optimizer
        case Phase.checkpoint:
            return _innermost_shown(traceback, _LOADING) or MemoryPhase.save
        case Phase.startup | Phase.idle | None:
            shown = _innermost_shown(traceback, _LOADING + _OF_STEPS)
            if shown is None and _FORWARD.search(traceback):
                return MemoryPhase.forward
            return shown or (MemoryPhase.load if innermost is not None else MemoryPhase.unknown)
        case _:
            return MemoryPhase.unknown


def _innermost_shown(traceback: str, markers: _Markers) -> MemoryPhase | None:
    """The phase that the innermost telling frame shows."""
    found = None
    for frame in _FRAME.finditer(traceback):
        for phase, file, function, source in markers:
            in_file = (
                function and re.search(file, frame["file"]) and re.fullmatch(function, frame["function"])
            )
            if in_file or (source and re.search(source, frame["source"])):
                found = phase
                break
    return found
