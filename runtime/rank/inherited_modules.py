"""Give a script the preloaded modules of its rank if it would import the same ones; else start over.

`preload.py` records, once per process, which modules were imported, in which order, from which files, and
which names were not found. `bootstrap.py` hides the modules before anything else. When the script imports
the first of them, its import path and environment are what torchrun's Python would import it with. If every
name resolves as it did before, and no variable that libraries read at import has changed, the modules are
put back, in 7 ms. If not, the rank executes a fresh interpreter, which runs the script from its first line.
Hooks that wait for a module are called as if it had just been imported.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

import wrapt

from grpo_run.runtime.launch.resolution import Place, changes_at_import, place_of, resolves_elsewhere

MAX_REASON_CHARACTERS = 200
OWN = "grpo_run"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Modules of the warm interpreter.

    `groups` are the modules by name that each step has added, without Python's own and ours. `places` says
    where each top-level name led under `path`; names that were looked for in vain led nowhere. `failure` says
    why the record is not complete, as a part of a sentence.
    """

    groups: Sequence[Mapping[str, ModuleType]] = ()
    places: Mapping[str, Place]
    path: Sequence[str]
    failure: str | None = None


_imported: Imported | None = None


def current() -> Imported | None:
    """Return what this process or its parent has imported in advance; None if it was not asked to."""
    return _imported


def import_in_advance(steps: Sequence[Callable[[], None]], path: Sequence[str]) -> None:
    """Import libraries and record them. An import that raises is recorded too: whatever it raises.

    Args:
        steps: each imports some libraries; later steps depend on earlier ones.
        path: the import path that a script without additions of its own has.
    """
    global _imported
    if _imported is not None and _imported.failure is None:
        return
    sys.path[:] = path
    missing = _Missing()
    sys.meta_path.append(missing)
    groups, failure = [], None
    try:
        for step in steps:
            before = set(sys.modules)
            step()
            groups.append(_added_since(before))
    except BaseException as error:  # noqa: BLE001 - a package that raises, or exits, must not end the run
        failure = _described(error)
    finally:
        sys.meta_path.remove(missing)
    places = dict.fromkeys(missing.names, ()) | _places()
    _imported = Imported(groups=groups, places=places, path=tuple(path), failure=failure)


def top_level(name: str) -> str:
    """Return the first part of a dotted name."""
    return name.partition(".")[0]


class _Missing:
    """Last on `sys.meta_path`: records the top-level names that no finder has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing."""
        if path is None:
            self.names.add(name)
        return None


def _added_since(before: set[str]) -> dict[str, ModuleType]:
    """The modules that a script must not see before it imports them."""
    kept = sys.stdlib_module_names | {OWN, "__main__", "__mp_main__"}
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name not in before and top_level(name) not in kept
    }


def _places(without: Collection[str] = ()) -> dict[str, Place]:
    """Where each top-level module is that has a place."""
    left_out = {OWN, "__main__", "__mp_main__", *without}
    found = {
        name: place_of(getattr(module, "__spec__", None))
        for name, module in list(sys.modules.items())
        if "." not in name and name not in left_out
    }
    return {name: place for name, place in found.items() if place}


def _described(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a library could not be imported in advance ({text[:MAX_REASON_CHARACTERS]})"


START_OVER_SECONDS = 600.0
"""A script that has run for longer is not started over: its first lines are then no longer only imports."""


class InheritedModules:
    """The hidden modules of this rank. A finder and loader of `sys.meta_path`.

    Args:
        imported: what the warm interpreter has imported.
        start_over: makes this process a fresh interpreter, for a reason; does not return.
        warn: tells the user that it is too late for that.
    """

    def __init__(
        self, imported: Imported, *, start_over: Callable[[str], object], warn: Callable[[str], None]
    ) -> None:
        self._imported = imported
        self._start_over = start_over
        self._warn = warn
        self._groups: list[dict[str, ModuleType]] = []
        self._environment = dict(os.environ)
        self._pid = os.getpid()
        self._hidden_at = time.monotonic()
        self._lock = threading.RLock()

    def hide(self) -> None:
        """Remove the modules from `sys.modules` until the script imports one of them."""
        for group in self._imported.groups:
            self._groups.append({name: sys.modules.pop(name) for name in group if name in sys.modules})
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called for each module that is not in `sys.modules`."""
        if path is not None:
            return None
        with self._lock:
            module = next((group[name] for group in self._groups if name in group), None)
            if module is None:
                return None
            # a process that the script has forked is no rank and cannot start over
            if os.getpid() == self._pid:
                self.compare()
        return _as_found(name, module, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module, which is replaced: it would overwrite attributes of the real
        one."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module by the inherited one, which is initialized, and put back all on which it
        depends."""
        name = module.__name__
        with self._lock:
            for index, group in enumerate(self._groups):
                if name in group:
                    sys.modules[name] = group[name]
                    self._restore(index)

    def compare(self) -> None:
        """Start over if the script would import something else than what was inherited."""
        reason = difference(self._imported, sys.path, self._environment, os.environ)
        if reason is None:
            return
        if time.monotonic() - self._hidden_at < START_OVER_SECONDS and not self._in_process_group():
            self._start_over(reason)
        self._warn(f"{reason}, but only after training began; the modules imported in advance are used")

    def _in_process_group(self) -> bool:
        distributed = sys.modules.get("torch.distributed")
        return distributed is not None and distributed.is_available() and distributed.is_initialized()

    def _restore(self, index: int) -> None:
        """Put back the modules of the groups up to this one, on which it depends."""
        restored: dict[str, ModuleType] = {}
        for group in self._groups[: index + 1]:
            restored |= {
                name: module for name, module in group.items() if sys.modules.get(name, module) is module
            }
            group.clear()
        sys.modules.update(restored)
        if not any(self._groups):
            sys.meta_path.remove(self)
        for module in restored.values():
            if isinstance(module, ModuleType):
                wrapt.notify_module_loaded(module)


def _as_found(name: str, module: ModuleType, loader: InheritedModules) -> ModuleSpec:
    """A specification like the module's own, whose loader yields the inherited module."""
    own = module.__spec__
    spec = ModuleSpec(name, loader, origin=own.origin if own else None)  # type: ignore[arg-type]
    if own is not None:
        spec.submodule_search_locations = own.submodule_search_locations
        spec.has_location = own.has_location
        spec.cached = own.cached
    return spec


def difference(
    imported: Imported, path: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]
) -> str | None:
    """Return why a script would import other code than what was imported, as a part of a sentence; None if
    not.

    Args:
        imported: the record of the warm interpreter.
        path: the script's import path.
        before: the environment at the start of the script.
        now: its environment.
    """
    if changed := changes_at_import(before, now):
        return f"the script sets {', '.join(changed)}"
    for name, place in resolves_elsewhere(imported.places, path, imported.path):
        return f"the script would import {name} from {os.path.dirname(place[0])}"
    return None


def forget_shadowed(kept: frozenset[str], path: Sequence[str], before: Sequence[str]) -> None:
    """In a fresh interpreter: forget the modules of which the script's import path has others.

    grpo-run has imported some modules before the script, which torchrun's Python would not have. It keeps
    using them.

    Args:
        kept: names of the modules that every Python program starts with.
        path: the script's import path.
        before: the path with which they were imported.
    """
    for shadowed, _ in resolves_elsewhere(_places(kept), path, before):
        for name in [name for name in sys.modules if top_level(name) == shadowed]:
            del sys.modules[name]
