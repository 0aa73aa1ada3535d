"""Import rules between the packages and between their rooms, read from the sources; no module is executed.

A room is a folder of modules. A module that lies beside folders, such as `runtime/errors.py`, is a room of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from support.imports import FILES, edges, imports, room

ALLOWED = {
    "watchdog": {"watchdog"},
    "runtime": {"runtime", "watchdog"},
    "trainers": {"trainers", "runtime", "watchdog"},
    "dashboards": {"dashboards", "runtime", "watchdog"},
    "cli": {"cli", "dashboards", "trainers", "runtime", "watchdog"},
}
PROCESSES = ("runtime.supervisor", "runtime.rank")
"""What runs in one process only. Neither imports the other, and what both share imports neither."""
INDEPENDENT = {"watchdog.deadlocks", "watchdog.stalls", "watchdog.waits", "watchdog.evidence"}
"""Rooms that do not import one another: each proves or collects by itself."""
MAINS = {name for name in FILES if name.endswith(".__main__")}
PUBLIC_BY_PURPOSE = {name for name in FILES if name.startswith("trainers.recipes.")} | {
    "dashboards.metrics.catalogue", "runtime.launching.display",
}  # fmt: skip
"""Recipes are read and copied, whoever imports them; queries of users rest on the catalogue, and programs
that launch runs on the protocol of a display."""
PURE_ROOMS: dict[str, set[str]] = {
    "watchdog": {"processes"},
    "watchdog.deadlocks": set(),
    "watchdog.diagnosis": set(),
    "watchdog.memory": {"cgroups", "host_reading"},
    "watchdog.stalls": set(),
    "watchdog.waits": set(),
}
"""Rooms of decisions: no clock, file or process. With the modules in them that observe."""
DECIDERS = {
    "runtime": {"call_names", "charts", "errors", "event"},
    "runtime.checkpoints": {"compatibility"},
    "runtime.history": {
        "events", "history", "progress", "lifecycle",
        "no_trainer_script", "recovery", "totals", "train_calls", "wall_states",
    },
    "runtime.features.caps": {"settings"},
    "runtime.features.injections": {"events"},
    "runtime.features.kept_completions": {"settings"},
    "runtime.features.learning_guards": {"events", "judge", "settings"},
    "runtime.features.masking": {"events", "selection"},
    "runtime.features.memory_plan": {"shown"},
    "runtime.features.memory_trace": {"events", "settings"},
    "runtime.features.phase_growth": {"events", "watch"},
    "runtime.features.quarantine": {"events", "settings", "shown"},
    "runtime.features.reward_workers": {"deadlines", "events", "settings"},
    "runtime.features.trackers": {"events"},
    "runtime.launch": {"config", "option"},
    "runtime.memory": {"facts"},
    "runtime.rank.memory": {"cleanup_policy"},
    "runtime.rank.saving": {"cadence"},
    "runtime.snapshots": {"drain_messages"},
    "runtime.supervisor": {"policy", "stop_means"},
    "runtime.upstream": {"trainer_kinds"},
    "watchdog.evidence": {"source", "stacks", "timeline"},
}  # fmt: skip
"""Single modules that decide, in rooms that also act."""
HEAVY = frozenset(
    {"torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "numpy", "matplotlib"}
)
OUTSIDE_WORLD = frozenset(
    [
        "asyncio", "ctypes", "fcntl", "io", "logging", "mmap", "multiprocessing", "os", "psutil", "random",
        "select", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib",
    ]
)  # fmt: skip
LIGHT = (
    "cli.checkpoints",
    "cli.launch",
    "cli.main",
    "cli.resume",
    "cli.save",
    "cli.serve",
    "cli.status",
    "cli.stop",
    "cli.top",
    "runtime.history.status",
    "runtime.features.learning_guards.settings",
    "runtime.launch.rank_settings",
    "runtime.processes.forkserver",
    "runtime.rank.hooks.attach",
    "runtime.rank.rollouts.limits",
    "runtime.upstream.trainer_names",
    "runtime.upstream.versions",
    "trainers",
    "trainers.caps",
)
"""Modules that must import fast: read-only commands, and what the supervisor needs before its ranks."""


def modules_in(folder: str) -> set[str]:
    """Return the modules that lie directly in a folder, without its `__init__`."""
    return {name for name in FILES if name.rpartition(".")[0] == folder and FILES[name].name != "__init__.py"}


def pure_modules() -> set[str]:
    """Return the modules that decide: those of the pure rooms, and single ones elsewhere."""
    of_rooms = {
        name
        for folder, others in PURE_ROOMS.items()
        for name in modules_in(folder)
        if name.rpartition(".")[2].lstrip("_") not in others
    }
    single = {f"{folder}.{name}" for folder, names in DECIDERS.items() for name in names}
    return of_rooms | {name if name in FILES else private_name(name) for name in single}


def private_name(name: str) -> str:
    """Return the name of a module as only its room uses it."""
    folder, _, last = name.rpartition(".")
    return f"{folder}._{last}"


def modules_loaded_with(name: str) -> tuple[set[str], set[str]]:
    """Return our modules, and the top-level names of all others, that importing this module loads."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in seen or module not in FILES:
            continue
        seen.add(module)
        parts = module.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]
        for imported in imports(module, module_level=True):
            if imported.startswith("grpo_run."):
                inner = imported.removeprefix("grpo_run.").split(".")
                waiting += [".".join(inner[:depth]) for depth in range(1, len(inner) + 1)]
            else:
                foreign.add(imported.partition(".")[0])
    return seen, foreign


def loaded_with(name: str) -> set[str]:
    """Return the top-level names of all third-party and standard modules that importing this module loads."""
    return modules_loaded_with(name)[1]


def broken(found: Mapping[str, set[str]], allowed: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the modules for which something was found that is not allowed, and what it is."""
    return {name: rest for name, words in found.items() if (rest := words - allowed.get(name, set()))}


def test_the_forkserver_imports_what_a_rank_uses() -> None:
    """A module that is missing there is imported again by every rank, which a recovery waits for."""
    folders = ("hooks", "saving", "resuming", "exact", "step")
    used = {name for folder in folders for name in modules_in(f"runtime.rank.{folder}")} | modules_in(
        "runtime.rank"
    )
    only_if_used = {"runtime.rank.consensus"}
    named = {word.removeprefix("grpo_run.") for word in imports("runtime.rank.preload")} & FILES.keys()
    loaded = {"runtime.rank.preload"}.union(*(modules_loaded_with(name)[0] for name in named))
    assert used - loaded <= only_if_used


def test_packages_import_in_one_direction() -> None:
    """watchdog <- runtime <- {trainers, dashboards} <- cli, also inside function bodies."""
    reached = {
        name: {word.split(".")[1] for word in imports(name) if word.startswith("grpo_run.")} for name in FILES
    }
    assert broken(reached, {name: ALLOWED[name.partition(".")[0]] for name in FILES}) == {}


def test_no_module_imports_a_folder_without_its_package() -> None:
    """`import watchdog` would find another project's package or load a second copy of ours."""
    tops = {name: {word.partition(".")[0] for word in imports(name)} & set(ALLOWED) for name in FILES}
    assert broken(tops, {}) == {}


def process(name: str) -> str:
    """Return the folder of the one process in which a module runs; empty for what several share.

    A feature's module is named for it (what scripts call runs in ranks), and a private one is of the process
    in which all who import it are.
    The composition of processes may import both.
    """
    parts = name.split(".")
    if parts[:2] == ["runtime", "features"] and len(parts) == 4:
        if parts[3].startswith("_"):
            users = {process(user) for user in modules_in(".".join(parts[:3])) if name in edges(user)}
            return users.pop() if len(users) == 1 else ""
        runs_in = f"runtime.{'rank' if parts[3] == 'script' else parts[3]}"
        return runs_in if runs_in in PROCESSES else ""
    return next((folder for folder in PROCESSES if f"{name}.".startswith(f"{folder}.")), "")


def test_what_the_processes_share_imports_neither_and_they_never_import_each_other() -> None:
    """Below `runtime/`: a reader knows from the folder in which process a line runs."""
    wrong = {
        (name, imported)
        for name in FILES
        if name.startswith("runtime.") and not name.startswith("runtime.launching")
        for imported in edges(name)
        if process(imported) not in ("", process(name))
    }
    assert wrong == set()


PARTS = ("command", "events", "metrics", "rank", "report", "script", "settings", "shown", "supervisor")
"""Modules of features, by whose names the core asks for them."""


def is_part(name: str) -> bool:
    """Whether a module is a feature's, and named for the place where it is used."""
    return name.startswith("runtime.features.") and name.rpartition(".")[2] in PARTS


def test_nothing_but_the_list_of_features_names_a_feature() -> None:
    """So a feature is deleted with its folder and its word; features do not import each other, either."""
    wrong = {
        (name, imported)
        for name in FILES
        for imported in edges(name)
        if imported.startswith("runtime.features.") and name != "runtime.features"
        if ".".join(name.split(".")[:3]) != ".".join(imported.split(".")[:3])
    }
    assert wrong == set()


def test_a_module_is_private_exactly_if_only_its_room_imports_it() -> None:
    """A reader of another room need not look at `_name.py`. Modules that a command or a process starts are
    public.
    """
    users: dict[str, set[str]] = {}
    for name in FILES:
        for imported in edges(name):
            users.setdefault(imported, set()).add(room(name))
    modules = {name for name, file in FILES.items() if file.name != "__init__.py" and room(name) != name}
    private = {name for name in modules if name.rpartition(".")[2].startswith("_") and name not in MAINS}
    assert {name for name in private if users.get(name, set()) != {room(name)}} == set()
    modules -= {name for name in modules if is_part(name)}
    only_inside = {name for name in modules if users.get(name) == {room(name)}}
    assert only_inside - private - PUBLIC_BY_PURPOSE == set()


def test_independent_rooms_do_not_import_one_another() -> None:
    """Deadlocks, stalls, waits and evidence are proved and collected apart."""
    wrong = {
        (name, imported)
        for name in FILES
        if room(name) in INDEPENDENT
        for imported in edges(name)
        if room(imported) in INDEPENDENT - {room(name)}
    }
    assert wrong == set()


def import_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a circle of a graph, empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_import_circle_of_modules() -> None:
    """Imports inside functions count too."""
    assert import_circle({name: edges(name) for name in FILES}) == []


def test_there_is_no_import_circle_of_rooms() -> None:
    """Rooms lie in layers: each imports only rooms below it."""
    graph: dict[str, set[str]] = {room(name): set() for name in FILES}
    for name in FILES:
        graph[room(name)] |= {room(imported) for imported in edges(name)} - {room(name)}
    assert import_circle(graph) == []


@pytest.mark.parametrize("name", sorted(pure_modules()))
def test_a_pure_module_uses_no_outside_resource(name: str) -> None:
    """Decisions depend on their arguments only: no clock, file, process or training library."""
    tops = {word.partition(".")[0] for word in imports(name)}
    assert not tops & (HEAVY | OUTSIDE_WORLD)


def test_pure_modules_import_pure_modules_only() -> None:
    """An impure module imported by a pure one would make it impure."""
    pure = pure_modules()
    packages = {name for name, file in FILES.items() if file.name == "__init__.py"}
    ours = {name: {word.removeprefix("grpo_run.") for word in imports(name)} & set(FILES) for name in pure}
    assert broken(ours, dict.fromkeys(pure, pure | packages)) == {}


def test_light_modules_do_not_import_training_libraries() -> None:
    """Neither directly nor through another module of ours: importing torch takes seconds."""
    features = [name for name in FILES if is_part(name)]
    names = (*pure_modules(), *LIGHT, *features)
    assert broken({name: loaded_with(name) & HEAVY for name in names}, {}) == {}


def test_the_import_check_follows_our_own_modules() -> None:
    """The check above can fail: the agent imports torch, and the code that supervises a run imports the
    agent.
    """
    assert "torch" in loaded_with("runtime.processes.agent")
    assert "torch" in loaded_with("runtime.launching._supervise")
