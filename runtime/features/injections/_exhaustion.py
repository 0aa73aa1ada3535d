"""The places in a step at which the injected fault `oom` raises.

Attached by `rank.py` to a trainer or to the models of a loop, in a rank that has such a fault. Reports
each place with the number of rows and tokens that are computed there at once; does not decide whether memory
runs out. Changes no value. Also has the errors that are raised.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import override_attributes
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase

Report = Callable[[MemoryPhase, float, float], None]
"""Receives a phase that may run out of memory, and how many rows and how many tokens, padding included, it
computes at once; infinity for what is not known."""


class Places:
    """The places of one call.

    Args:
        report: called at each place; raises if memory is to run out there.
        open_phases: returns the phases that are open on the board, the outermost first.
    """

    def __init__(self, report: Report, open_phases: Callable[[], tuple[Phase, ...]]) -> None:
        self._report = report
        self._open_phases = open_phases
        self._forward_size = math.inf, math.inf
        self._generating = False

    @contextmanager
    def watched(self, modules: Iterable[Any], trainer: Any = None) -> Iterator[None]:
        """Report forward passes of the modules, backward passes, and a trainer's scoring, for the length of
        the block."""
        import torch

        with ExitStack() as hooks:
            for module in (part for model in modules for part in _with_base(model)):
                if hasattr(module, "generate"):
                    hooks.enter_context(override_attributes(module, generate=self._marked_generate(module)))
                if getattr(module, "_compiled_call_impl", None) is None:  # a hook would break the graph
                    handle = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                    hooks.callback(handle.remove)
            backward = torch.autograd.backward

            @functools.wraps(backward)
            def reported_backward(*args: Any, **kwargs: Any) -> Any:
                if self._open_phases()[-1:] == (Phase.forward_backward,):
                    self._report(MemoryPhase.backward, *self._forward_size)
                return backward(*args, **kwargs)

            hooks.enter_context(override_attributes(torch.autograd, backward=reported_backward))
            if hasattr(trainer, trainer_names.GENERATE_AND_SCORE):
                self._watch_rollouts(trainer, hooks)
            yield

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        phases = self._open_phases()
        if not phases or Phase.eval in phases:
            return
        size = _size(args, kwargs)
        if phases[-1] is Phase.generate or (self._generating and phases[-1] is Phase.forward_backward):
            self._report(MemoryPhase.generate, *size)
        elif phases[-1] is not Phase.forward_backward:
            return
        elif torch.is_grad_enabled():
            self._forward_size = size
            self._report(MemoryPhase.forward, *size)
        else:  # in the body of a hand-written loop, which may generate by forward passes of its own
            self._report(MemoryPhase.generate, *size)
            self._report(MemoryPhase.score, *size)

    def _marked_generate(self, module: Any) -> Callable[..., Any]:
        """The model's `generate`, during which forward passes belong to generation. It may be divided further
        inside."""
        generate = module.generate

        @functools.wraps(generate)
        def marked_generate(*args: Any, **kwargs: Any) -> Any:
            self._generating = True
            try:
                return generate(*args, **kwargs)
            finally:
                self._generating = False

        return marked_generate

    def _watch_rollouts(self, trainer: Any, hooks: ExitStack) -> None:
        score = getattr(trainer, trainer_names.GENERATE_AND_SCORE)
        generate = getattr(trainer, trainer_names.GENERATE)

        @functools.wraps(score)
        def reported_scoring(*args: Any, **kwargs: Any) -> Any:
            scored = score(*args, **kwargs)
            if Phase.eval not in self._open_phases():
                self._report(MemoryPhase.score, trainer.args.per_device_train_batch_size, math.inf)
            return scored

        @functools.wraps(generate)
        def reported_generation(prompts: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM calls no module of the rank
            if trainer.args.use_vllm and Phase.eval not in self._open_phases():
                self._report(MemoryPhase.generate, len(prompts), math.inf)
            return generate(prompts, *args, **kwargs)

        wrapped = {
            trainer_names.GENERATE_AND_SCORE: reported_scoring,
            trainer_names.GENERATE: reported_generation,
        }
        hooks.enter_context(override_attributes(trainer, **wrapped))


def _with_base(model: Any) -> tuple[Any, ...]:
    """A model, and the one that PEFT has put its adapters into: generation calls that one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (model,) if base is model else (model, base)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    """Rows and tokens of a model's input: its first dimension, and that times its second."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    for value in (*named, *args, *kwargs.values()):
        shape: Any = getattr(value, "shape", ())
        if len(shape) > 0:
            return float(shape[0]), float(shape[0] * shape[1]) if len(shape) > 1 else math.inf
    return math.inf, math.inf


class Due(Protocol):
    """What `FaultContext` has for this error."""

    text: str


def exhaust_memory(context: Due) -> NoReturn:
    """Raise what torch's allocator raises. The error stands for one of a trainer: no line of the script has
    asked for the memory."""
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which"
        " 512.00 MiB is free. Including non-PyTorch memory, this process has 78.65 GiB memory in use. Of the"
        " allocated memory 75.91 GiB is allocated by PyTorch, and 1.60 GiB is reserved by PyTorch but"
        f" unallocated. ({context.text})"
    )
