"""The features of a run: one folder each, with everything that belongs to it.

A folder has only the modules for which the feature has something, each named for where it is used:

    settings.py    its options (`SETTINGS`, a frozen dataclass), and what else its parts are told
    events.py      its events in the journal, what is replayed from them, and what is shown of that (`PART`, a
                   `HistoryPart`)
    supervisor.py  what it watches and answers in the supervisor (`PART`, which makes a `SupervisorFeature`)
    rank.py        what it does in a rank, at the points of `runtime/rank/points.py` (`PART`, a `RankFeature`)
    script.py      what a script calls, through a module of the same name in `trainers/`
    shown.py       words that metrics and terminal show: plain data
    report.py      lines for the report of a run (`lines`), from files of its own in the run directory
    command.py     a command (`NAME`, `HELP`, `add_options`, `run`), which `cli/feature_command.py` calls
    metrics.py     its metrics (`METRICS`), as `runtime/metrics.py` describes them
    panels.json    its panels, by dashboard and row; `alerts.yml`: its alert rules

The core asks for the parts by these names and never imports a feature, and features do not import each other:
what two of them need belongs to the core. A feature is removed by deleting its folder and its word in
`FEATURES`. The composition of a run and of a rank (`runtime/launching/`) passes the parts on. Imports no
part by itself, because some may be imported in one process only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

from grpo_run.runtime.features import (
    agent_tools,
    caps,
    injections,
    kept_completions,
    learning_guards,
    ledger,
    masking,
    memory_plan,
    memory_trace,
    phase_growth,
    quarantine,
    rehearsal,
    replay,
    replicas,
    reward_workers,
    rollout_server,
    trackers,
)

FEATURES: tuple[ModuleType, ...] = (
    ledger, injections, rollout_server, agent_tools, caps, memory_plan, reward_workers, quarantine, trackers,
    phase_growth, memory_trace, kept_completions, masking, learning_guards,
    replicas, rehearsal, replay,
)  # fmt: skip
"""All features, in the order in which they are asked."""


@functools.cache
def modules(name: str) -> tuple[ModuleType, ...]:
    """Return the modules of one name of the features that have it, in the order of `FEATURES`."""
    names = [f"{feature.__name__}.{name}" for feature in FEATURES]
    return tuple(
        importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None
    )


def for_scripts(name: str) -> ModuleType:
    """Return what a feature has for scripts."""
    return importlib.import_module(f"{__name__}.{name}.script")


def feature_settings() -> tuple[Any, ...]:
    """Return the classes of settings that features declare."""
    return tuple(module.SETTINGS for module in modules("settings") if hasattr(module, "SETTINGS"))


def shown(kind: str) -> dict[str, str]:
    """Return the words of one kind, such as `ACTIONS`, that features have in their modules `shown`."""
    return {word: text for module in modules("shown") for word, text in getattr(module, kind, {}).items()}
