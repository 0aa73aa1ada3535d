"""Weights that a checkpoint has under other names than the model.

transformers saves some models in the format of their publisher: a mixture of experts has one tensor for
each expert in the file, and one for all of them in the model. `from_pretrained` converts them. A resume
does not: `Trainer` ignores names that the model does not have, so the experts would begin anew.
`restore_renamed_weights` adds what was ignored. Called by `runtime/rank/hooks/train_call.py` around the
resume of a call. Does not change what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods


def restore_renamed_weights(trainer: Any, warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """Within the block, a resume loads weights that the checkpoint has under other names too.

    Weights that are trained and not in the checkpoint at all are named in a warning. Under DeepSpeed and
    FSDP, which save the model's own names, and for adapters nothing changes.

    Args:
        warn: called with one line.
    """

    def load(resume: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = trainer.model
        loaded = _LoadedNames(model)
        with override_attributes(model, load_state_dict=loaded.load):
            result = resume(*args, **kwargs)
        lost = loaded.lost
        if lost:
            lost = _convert(model, lost, loaded.ignored)
        if lost:
            count = "1 trained parameter" if len(lost) == 1 else f"{len(lost)} trained parameters"
            warn(
                f"the checkpoint does not have {count} of {type(model).__name__} ({min(lost)}), which keep"
                " the values that the script gave them; the results differ from those of an"
                " uninterrupted run"
            )
        return result

    return wrapped_methods(trainer, {trainer_names.LOAD_WEIGHTS: [load]})


class _LoadedNames:
    """What was loaded into a model, over all files of a checkpoint.

    Attributes:
        ignored: tensors under names that the model does not have.
    """

    def __init__(self, model: Any) -> None:
        self._load = model.load_state_dict
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._versions = {name: one._version for name, one in self._trained.items()}
        self._called = False
        self.ignored: dict[str, torch.Tensor] = {}

    def load(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`load_state_dict` of the model."""
        result = self._load(state_dict, *args, **kwargs)
        self._called = True
        self.ignored.update((name, state_dict[name]) for name in result.unexpected_keys)
        return result

    @property
    def lost(self) -> dict[str, torch.Tensor]:
        """Parameters that are trained and to which nothing was copied; none if no file was loaded by name."""
        if not self._called:
            return {}
        return {name: one for name, one in self._trained.items() if one._version == self._versions[name]}


def _convert(
    model: Any, lost: Mapping[str, torch.Tensor], ignored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy what transformers makes of the ignored tensors to the parameters that were lost; return those
    still lost."""
    if not ignored or not hasattr(type(model), "from_pretrained"):
        return dict(lost)
    converted, report = type(model).from_pretrained(
        None, config=model.config, state_dict=dict(ignored), dtype=model.dtype, output_loading_info=True
    )
    missing = set(report["missing_keys"])
    found = {name: one for name, one in converted.named_parameters() if name not in missing}
    with torch.no_grad():
        for name in lost.keys() & found.keys():
            lost[name].copy_(found[name])
    return {name: one for name, one in lost.items() if name not in found}
