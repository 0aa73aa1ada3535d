"""Where tensors are made: a dispatch mode that notes the line of the script for new storages.

Used by `_tracer.py` for single steps, once tensors of several steps stay alive: a mode that is always active
would make steps of a small model four times as long. Imported after the script has imported torch. Changes no
result and holds no tensor.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from grpo_run.runtime.features.memory_trace._census import storage_of
from grpo_run.runtime.features.memory_trace.events import Site
from grpo_run.runtime.upstream.memory_names import current_dispatch_mode
from grpo_run.watchdog.evidence.source import is_user_file

MOST_SITES = 200_000
"""Storages of one step."""
_FRESH = ("aten::lift_fresh", "aten::lift")
"""Operators that return what was just made from Python values; by their schema it is their argument."""
_is_script = functools.cache(is_user_file)


def site_above(frame: FrameType | None) -> Site | None:
    """Return the innermost line of the script on a stack; None without."""
    while frame is not None:
        code = frame.f_code
        if _is_script(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


class SiteRecorder:
    """Records where tensors are made while its mode is active.

    Args:
        observe: calls a function with arguments, such that its errors do not reach the script.
    """

    def __init__(self, observe: Callable[..., object]) -> None:
        self._observe = observe
        self._sites: dict[int, tuple[weakref.ref[Any], Site]] = {}
        self._mode: Any = None

    def begin(self) -> bool:
        """Activate the mode in this thread and its backward passes. Returns whether that was possible."""
        from grpo_run.runtime.upstream import dispatch_modes as dispatch

        if dispatch.is_in_torch_dispatch_mode():
            return False  # the script's own mode would end before or after ours
        recorder = self

        class Mode(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
            """Passes every call on; compiled code is neither traced nor compiled otherwise because of it."""

            supports_higher_order_operators = True

            @classmethod
            def is_infra_mode(cls) -> bool:
                return True

            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                result = func(*args, **kwargs) if kwargs else func(*args)
                if _makes_storages(func):
                    recorder._observe(recorder._note, result)
                return result

        self._mode = Mode()  # type: ignore[no-untyped-call, unused-ignore]
        self._mode.__enter__()
        return True

    def end(self) -> bool:
        """Deactivate the mode. Returns False if a mode that the script has entered since must end first."""
        if self._mode is not None:
            if current_dispatch_mode() is not self._mode:
                return False
            self._mode.__exit__(None, None, None)
            self._mode = None
        return True

    def site_of(self, key: int) -> Site | None:
        """Return where a storage that is alive was made; None if that was not recorded."""
        reference, site = self._sites.get(key, (None, None))
        return site if reference is not None and reference() is not None else None

    def _note(self, result: Any) -> None:
        torch = sys.modules["torch"]
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is None or self.site_of(storage._cdata) or len(self._sites) >= MOST_SITES:
                continue
            site = site_above(sys._getframe(2))
            if site is not None:
                self._sites[storage._cdata] = weakref.ref(storage), site


@functools.cache
def _makes_storages(func: Any) -> bool:
    """Whether an operator returns something new; views and operators in place do not."""
    # a higher-order operator has none: what is inside it comes by itself
    schema: Any = getattr(func, "_schema", None)
    return bool(schema) and (schema.name in _FRESH or any(one.alias_info is None for one in schema.returns))
