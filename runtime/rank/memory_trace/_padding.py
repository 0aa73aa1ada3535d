"""Which share of the tokens that a model is given is real, by the attention masks of its calls.

Used by `tracer.py`. Padding to the longest row of a batch is usual; columns that no row of any batch uses are
not. A mask is copied to the host, which allocates nothing on the device. `PaddingWatch` counts, `wasteful`
decides and is pure.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.rank.memory_trace._census import Group, Site, group_of, storage_of
from grpo_run.runtime.rank.memory_trace._sites import site_above

STEPS = 5
"""Steps in which all batches must be padded alike before it is reported."""
BATCHES = 8
"""Batches, for the same."""
REAL_SHARE = 0.5
"""Share of real tokens, and of columns that the longest row uses, up to which padding is reported."""
LEAST_WASTE = 16
"""Columns that nothing uses. Fewer may come from padding to a multiple of 8 or 16."""
OTHER_WIDTHS = 0.25
"""Share of batches of other widths up to which batches count as padded alike."""
CALLS_A_STEP = 64
"""Calls of a step whose masks are read."""


@dataclass(kw_only=True)
class Padded:
    """Calls with masks of one width.

    Attributes:
        longest: columns that any row uses, the most of all batches.
        real: tokens that are not padding, of `tokens`.
        rows: of the last batch.
        first_step: of the first call.
        group: of the masks.
        made: where a mask was made; None if that was not recorded.
        site: the line of the script that called the model last.
    """

    width: int
    with_grad: bool
    steps: int = 0
    last_step: int = -1
    batches: int = 0
    longest: int = 0
    real: int = 0
    tokens: int = 0
    rows: int = 0
    first_step: int = 0
    group: Group = Group("int64", 2)  # noqa: RUF009
    made: Site | None = None
    site: Site | None = None

    @property
    def share(self) -> float:
        """Share of real tokens."""
        return self.real / self.tokens if self.tokens else 1.0


def wasteful(calls: Iterable[Padded], *, rollouts: int | None) -> Padded | None:
    """Return the calls that were padded to the longest possible; None if there are none, or not yet enough.

    Args:
        calls: since the first step.
        rollouts: how many rollouts the batches are from; None if the script generates nothing. The batches of
            one rollout are padded alike, and its longest row is in one of them only.
    """
    by_mode: dict[bool, list[Padded]] = {True: [], False: []}
    for one in calls:
        by_mode[one.with_grad].append(one)
    for mode, alike in by_mode.items():
        found = max(alike, key=lambda one: one.batches, default=None)
        if found is None or found.steps < STEPS or found.batches < BATCHES:
            continue
        if mode and rollouts is not None and rollouts < STEPS:
            continue
        if sum(one.batches for one in alike) > found.batches * (1 + OTHER_WIDTHS):
            continue  # batches of many widths are padded to what they need
        if (
            found.width - found.longest >= LEAST_WASTE
            and found.longest <= REAL_SHARE * found.width
            and found.share <= REAL_SHARE
        ):
            return found
    return None


class PaddingWatch:
    """Counts the real tokens of the calls of models.

    Args:
        step: returns the step in progress.
        site_of: returns where a storage was made, if that is recorded at present.
        observe: calls a function with arguments, such that its errors do not reach the script.
        begun: called before the outermost call of a model.
    """

    def __init__(
        self,
        step: Callable[[], int],
        site_of: Callable[[int], Site | None],
        observe: Callable[..., object] = lambda look, *arguments: look(*arguments),
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._begun = begun
        self._observe = observe
        self._site_of = site_of
        self._padded: dict[tuple[int, bool], Padded] = {}
        self._without_grad = -1
        self._rollouts = 0
        self._step = step
        self._depth = 0
        self._calls = 0
        self._calls_step = -1

    def watch(self, model_class: Any) -> None:
        """Wrap the calls of a class of models; only the outermost of nested calls counts."""
        original = model_class.__call__

        @functools.wraps(original)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._observe(self._begun)
                mask = kwargs.get("attention_mask")
                if mask is not None:
                    self._observe(self._count, mask, args[0] if args else kwargs.get("input_ids"))
            self._depth += 1
            try:
                return original(model, *args, **kwargs)
            finally:
                self._depth -= 1

        model_class.__call__ = call

    def found(self, rollouts: int) -> Padded | None:
        """Return the calls that were padded to the longest possible; see `wasteful`.

        Args:
            rollouts: how many the trainer has generated.
        """
        known = max(rollouts, self._rollouts)
        return wasteful(self._padded.values(), rollouts=known or None)

    def _count(self, mask: Any, ids: Any) -> None:
        torch = sys.modules["torch"]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or torch.compiler.is_compiling():
            return
        if ids is not None and getattr(ids, "shape", None) != mask.shape:
            return  # a decoding step: its mask is longer than its input
        step = self._step()
        if step != self._calls_step:
            self._calls, self._calls_step = 0, step
        self._calls += 1
        if self._calls > CALLS_A_STEP:
            return
        used = mask.detach().cpu().ne(0)
        width = int(used.shape[1])
        with_grad = torch.is_grad_enabled()
        if not with_grad and step != self._without_grad:
            self._rollouts += 1
            self._without_grad = step
        found = self._padded.setdefault(
            (width, with_grad), Padded(width=width, with_grad=with_grad, first_step=step)
        )
        if step != found.last_step:
            found.steps += 1
            found.last_step = step
        found.batches += 1
        found.rows = int(used.shape[0])
        found.longest = max(found.longest, int(used.any(0).sum()))
        found.real += int(used.sum())
        found.tokens += used.numel()
        found.site = site_above(sys._getframe(2))
        found.group = group_of(mask)
        storage = storage_of(mask)
        if found.made is None and storage is not None:
            found.made = self._site_of(storage._cdata)
