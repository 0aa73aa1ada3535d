"""Let transformers enable gradients of the input embeddings repeatedly without a new hook each time.

Since transformers 5.0, `gradient_checkpointing_enable` calls `enable_input_require_grads`, which registers a
forward hook on the input embeddings and forgets the handle of the last one. TRL disables and enables gradient
checkpointing around every rollout, so each step of GRPO and RLOO leaves hooks that every later forward pass
runs: after 1,500 steps they take more time than a step's generation itself. Called by
`runtime/rank/hooks/train_call.py`. Removes only hooks whose handles transformers itself keeps; a hook that a
script registers is never touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_run.runtime.upstream.patches import override_attributes

HANDLE = "_require_grads_hook"
"""Attribute of a model: the handle of the hook that `enable_input_require_grads` has registered last."""


@contextmanager
def one_hook_per_model(replaced: Callable[[], None]) -> Iterator[None]:
    """Within the block, remove the hooks of the last `enable_input_require_grads` before it adds new ones.

    Subclasses that override the method are left as they are.

    Args:
        replaced: called each time hooks were there already.
    """
    from transformers import PreTrainedModel

    enable = PreTrainedModel.enable_input_require_grads

    @functools.wraps(enable)
    def enable_once(model: Any) -> Any:
        if hasattr(model, HANDLE):
            model.disable_input_require_grads()
            replaced()
        return enable(model)

    with override_attributes(PreTrainedModel, enable_input_require_grads=enable_once):
        yield
