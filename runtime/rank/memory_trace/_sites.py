"""Where tensors are made: a dispatch mode that notes the line of the script for new storages.

Used by `tracer.py` for single steps, once a group of tensors is suspicious: a mode that is always active
would make steps of a small model four times as long. Imported after the script has imported torch. Changes no
result and holds no tensor.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

from grpo_run.runtime.rank.memory_trace._census import Group, Site, group_of, storage_of
from grpo_run.runtime.upstream.memory_names import current_dispatch_mode
from grpo_run.watchdog.evidence.source import is_outside_frameworks, is_user_file

MOST_FRAMES = 400
"""Frames that are looked at for the script's; the stack of a layer has about 100."""
MOST_SITES = 200_000
"""Storages of one step."""
_FRESH = ("aten::lift_fresh", "aten::lift")
"""Operators that return what was just made from Python values; by their schema it is their argument."""


_places: dict[CodeType, bool | None] = {}
"""By code: True for the script's, False for a library's, None for torch's and our own."""


def _kind(code: CodeType) -> bool | None:
    if code not in _places:
        file = code.co_filename
        _places[code] = True if is_user_file(file) else False if is_outside_frameworks(file) else None
    return _places[code]


def site_above(frame: FrameType | None) -> Site | None:
    """Return the innermost line of the script on a stack, with that of a library below it; None without."""
    library: tuple[str, int] | None = None
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        kind = _kind(frame.f_code)
        if kind:
            code = frame.f_code
            return Site(code.co_filename, frame.f_lineno, code.co_name, *(library or (None, None)))
        if kind is False and library is None:
            library = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


class SiteRecorder:
    """Records sites of the tensors of some groups while its mode is active.

    Attributes:
        sites: by storage that is alive.

    Args:
        groups: of tensors.
        observe: calls a function with arguments, such that its errors do not reach the script.
    """

    def __init__(
        self,
        groups: Collection[Group],
        observe: Callable[..., object] = lambda look, *arguments: look(*arguments),
    ) -> None:
        self._observe = observe
        self.sites: dict[int, Site] = {}
        self._groups = frozenset(groups)
        self._references: dict[int, weakref.ref[Any]] = {}
        self._makes: dict[Any, bool] = {}
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
                makes = recorder._makes.get(func)
                if makes is None:
                    makes = recorder._makes[func] = _makes_storages(func)
                if makes:
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

    def _note(self, result: Any) -> None:
        torch = sys.modules["torch"]
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if not isinstance(tensor, torch.Tensor) or group_of(tensor) not in self._groups:
                continue
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self.sites or len(self.sites) >= MOST_SITES:
                continue
            site = site_above(sys._getframe(2))
            if site is not None:
                key = storage._cdata
                self.sites[key] = site
                self._references[key] = weakref.ref(storage, functools.partial(self._freed, key))

    def _freed(self, key: int, _: weakref.ref[Any]) -> None:
        self.sites.pop(key, None)
        self._references.pop(key, None)


def _makes_storages(func: Any) -> bool:
    """Whether an operator returns something new; views and operators in place do not."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False  # a higher-order operator: what is inside it comes by itself
    return schema.name in _FRESH or any(returned.alias_info is None for returned in schema.returns)
