"""The imports of the warm interpreter: their order, their files, and names that it did not find.

`preload.py` records it, once per process; a rank finds the record in its memory. Decides nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

from grpo_run.runtime.launch.sources.resolution import Place, place_of

MAX_REASON_CHARACTERS = 200
OWN = "grpo_run"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Modules of the warm interpreter.

    `groups` are the modules by name that each step has added, without Python's own and ours. `places` says where each
    top-level name led under `path`; names that were looked for in vain led nowhere. `failure` says why the record is
    not complete, as a part of a sentence.
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
    places = dict.fromkeys(missing.names, ()) | dict(_places())
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


def _places() -> list[tuple[str, Place]]:
    """Where each top-level module is that has a place."""
    found = [
        (name, place_of(getattr(module, "__spec__", None)))
        for name, module in list(sys.modules.items())
        if "." not in name and name not in (OWN, "__main__", "__mp_main__")
    ]
    return [(name, place) for name, place in found if place]


def _described(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a library could not be imported in advance ({text[:MAX_REASON_CHARACTERS]})"
