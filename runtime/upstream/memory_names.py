"""Private names of TRL and accelerate that a memory trace calls or replaces: scoring, and the language-model
head.

Used by `runtime/planning/`. The head's Triton kernels cannot run without a GPU. Their torch counterparts
allocate temporaries that the kernels do not, so a trace for a GPU replaces them by functions that allocate
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from grpo_run.runtime.upstream import rollout_names
from grpo_run.runtime.upstream.patches import override_attributes

HEAD_MODULE = "trl.trainer.utils"
"""Where the patched forward of a model looks up `USES_TRITON`."""
KERNEL_MODULE = "trl.kernels.chunked_logprob"
HEAD = "ChunkedLogProbFunction"
"""Autograd function in `KERNEL_MODULE` that computes log-probabilities in tiles."""
USES_TRITON = "_use_triton"
TILES = ("_forward_tile", "_backward_tile", "_addmm_fp32")
"""What the head does with a tile without Triton: fold, differentiate, and multiply in fp32. On CUDA none of
them allocates.
"""
TOKENS = rollout_names.ITEMS
"""Tokens of a step: a key of GRPO's micro-batches, and an argument of SFT's `compute_loss`."""
INPUT_NAMES = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", TOKENS,
    "old_per_token_logps", "ref_per_token_logps",
)  # fmt: skip
"""Keys of a micro-batch that GRPO's `compute_loss` reads; the last two only where they are computed."""
SFT_INPUT_NAMES = ("input_ids", "attention_mask", "labels")
"""Keys of a micro-batch of SFT."""
OLD_SUMS = rollout_names.OLD_LOGPS
"""Key of a micro-batch that RLOO's `compute_loss` reads: log-probabilities of whole completions under the old
policy.
"""

LORA_FOLLOWED = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "use_rslora", "init_lora_weights",
        "inference_mode", "peft_type", "base_model_name_or_path", "revision",
    }
)  # fmt: skip
"""Settings of peft's `LoraConfig` that are followed, or change no memory; others are refused if they are
set.
"""


def score(trainer: Any, model: Any, token_ids: Any, mask: Any, *, keep: int, rows: int) -> Any:
    """Return the log-probabilities of the last `keep` tokens, computed for `rows` rows at a time."""
    return getattr(trainer, rollout_names.SCORE)(model, token_ids, mask, keep, batch_size=rows)[0]


def forget_accelerator() -> None:
    """Let the next trainer of this process have another precision; accelerate keeps the first one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextlib.contextmanager
def traced_head(holding: Callable[[str], AbstractContextManager[None]], *, on_gpu: bool) -> Iterator[None]:
    """Mark what the head allocates as logits and, for a GPU, compute tiles as its kernels would.

    Args:
        holding: called with `logits` around the head's forward and backward.
        on_gpu: only valid positions are scored, and folding a tile allocates nothing.
    """
    import trl.kernels.chunked_logprob
    import trl.trainer.utils  # noqa: F401

    kernels = sys.modules[KERNEL_MODULE]
    head = getattr(kernels, HEAD)

    def marked(method: Any) -> staticmethod[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with holding("logits"):
                return method(*args, **kwargs)

        return staticmethod(call)

    with contextlib.ExitStack() as replaced:
        for name in ("forward", "backward"):
            replaced.enter_context(override_attributes(head, **{name: marked(getattr(head, name))}))
        if on_gpu:
            replaced.enter_context(override_attributes(sys.modules[HEAD_MODULE], **{USES_TRITON: _yes}))
            for name in TILES:
                replaced.enter_context(override_attributes(kernels, **{name: _nothing}))
        yield


def _yes(device: Any) -> bool:
    return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def model_classes(config: Any) -> Any:
    """Return the class, or the classes, of causal models of a configuration; None if there is none."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)
