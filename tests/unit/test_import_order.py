"""Import rules between and inside the packages, read from the sources; no module is executed."""

from __future__ import annotations

from collections.abc import Mapping

from support.imports import FILES, edges, imports

ALLOWED = {
    "watchdog": {"watchdog"},
    "runtime": {"runtime", "watchdog"},
    "trainers": {"trainers", "runtime", "watchdog"},
    "dashboards": {"dashboards", "runtime", "watchdog"},
    "cli": {"cli", "dashboards", "trainers", "runtime", "watchdog"},
}
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "watchdog": (
        ("diagnosis", "run_processes", "progress"),
        ("deadlocks",), ("stalls",), ("waits",), ("evidence",), ("host_memory",),
        (
            "accounting", "causes", "cgroups", "duration_text", "size_text", "observation", "origins", "out_of_memory", "processes",
            "socket_tables", "rank_names", "callback_names", "verdict",
        ),
        ("learning",),
    ),
    "runtime": (
        ("supervision", "catalog"), ("launch",), ("staging",), ("detection",), ("record",), ("continuity", "rollouts"), ("checkpoints",),
        ("processes",), ("board", "host_memory"), ("named_signals", "process_identity"), ("call_names", "errors", "files", "upstream"),
    ),
    "trainers": (
        ("preload", "bootstrap", "recipes", "consensus", "loop"),
        ("hooks", "loops"), ("forecast",), ("calls",), ("exclusion", "quarantine", "unguarded", "saving", "rewards"), ("resuming",), ("loading",), ("capture",), ("exact",), ("caps", "learning", "memory_plan"), ("rank",), ("hygiene",), ("accounting", "planning", "memory_trace"),
        ("async_functions", "inherited", "patches", "upstream"),
    ),
    "dashboards": (
        ("curves", "reward_plot", "terminal"),
        ("provisioning", "incident_report"), ("metrics",), ("grafana", "prometheus"),
    ),
}  # fmt: skip
"""Layers inside the packages, top first: a folder or module imports its own layer and the layers below it.

A package's own `__init__` is above all of them.
"""
INDEPENDENT = {"watchdog": ({"deadlocks", "stalls", "waits", "evidence"},)}
"""Folders that do not import one another, although the order of layers would allow it."""
PURE = (
    "watchdog.accounting.phase_memory",
    "watchdog.causes",
    "watchdog.size_text",
    "watchdog.deadlocks.collectives",
    "watchdog.deadlocks.completion",
    "watchdog.deadlocks.culprit",
    "watchdog.stalls.deadlines",
    "watchdog.deadlocks.proof",
    "watchdog.diagnosis.exits",
    "watchdog.stalls.durations",
    "watchdog.observation",
    "watchdog.learning",
    "watchdog.learning.alarm",
    "watchdog.learning.capped",
    "watchdog.learning.divergence",
    "watchdog.learning.entropy",
    "watchdog.learning.judging",
    "watchdog.learning.nonfinite",
    "watchdog.learning.observations",
    "watchdog.learning.reward_collapse",
    "watchdog.learning.rules",
    "watchdog.learning.zero_variance",
    "watchdog.progress",
    "watchdog.progress.late_ranks",
    "watchdog.progress.step_clock",
    "watchdog.stalls",
    "watchdog.origins",
    "watchdog.deadlocks.sentences",
    "watchdog.stalls.detection",
    "watchdog.stalls.exit_hangs",
    "watchdog.stalls.nested_phases",
    "watchdog.stalls.process_clocks",
    "watchdog.stalls.awaited",
    "watchdog.stalls.overdue",
    "watchdog.stalls.sentences",
    "watchdog.stalls.stall",
    "watchdog.stalls.stragglers",
    "watchdog.deadlocks.deadlock",
    "watchdog.deadlocks.history",
    "watchdog.deadlocks.positions",
    "watchdog.deadlocks.recording",
    "watchdog.callback_names",
    "watchdog.rank_names",
    "watchdog.duration_text",
    "watchdog.evidence.timeline",
    "watchdog.verdict",
    "watchdog.waits.idle_threads",
    "watchdog.waits.looks",
    "watchdog.waits.proof",
    "watchdog.waits.sentences",
    "watchdog.waits.system_calls",
    "runtime.call_names",
    "runtime.record.commits",
    "runtime.rollouts.exclusions",
    "runtime.rollouts.quarantine",
    "runtime.launch.injections",
    "runtime.launch.injections.injection",
    "runtime.launch.injections.kinds",
    "runtime.launch.injections.parsing",
    "runtime.launch.injections.selection",
    "runtime.record.history_parts",
    "runtime.record.history_parts.failure_rate",
    "runtime.record.history_parts.phase_records",
    "runtime.record.history_parts.lost_checkpoints",
    "runtime.record.history_parts.recoveries",
    "runtime.record.history_parts.repeats",
    "runtime.record.history_parts.wall_time",
    "runtime.record.history_parts.step_times",
    "runtime.record.waiting",
    "runtime.supervision.lifecycle",
    "runtime.supervision.policy",
    "runtime.supervision.rollback.policy",
    "runtime.supervision.rollback",
    "runtime.continuity.decision",
    "runtime.continuity.fresh_seeds",
    "watchdog.diagnosis.guards",
    "watchdog.diagnosis.host_oom",
    "watchdog.host_memory.pressure",
    "watchdog.host_memory.kills",
    "watchdog.host_memory.sample",
    "watchdog.diagnosis.lost_peers",
    "watchdog.diagnosis.out_of_memory",
    "watchdog.diagnosis.place",
    "watchdog.out_of_memory.figures",
    "watchdog.out_of_memory.output",
    "watchdog.out_of_memory.phases",
    "watchdog.out_of_memory.retries",
    "watchdog.out_of_memory.shortage",
    "watchdog.out_of_memory.error_patterns",
    "runtime.continuity.memory_restarts",
    "runtime.continuity.own_training",
    "runtime.continuity.recovery",
    "runtime.continuity.rewards",
    "runtime.continuity.train_calls",
    "trainers.accounting.step_memory",
    "trainers.forecast.decision",
    "trainers.forecast.fit",
    "trainers.hygiene.policy",
    "trainers.rewards.bisection",
    "trainers.rewards.deadlines",
    "trainers.rewards.workers.output",
    "runtime.supervision.unguarded.stop_means",
    "runtime.supervision.unguarded.own_saves",
    "runtime.continuity.expected",
    "runtime.continuity.memory",
    "runtime.continuity.memory.closed_form",
    "runtime.continuity.memory.findings",
    "runtime.continuity.memory.split_exactness",
    "runtime.continuity.memory_facts",
    "runtime.continuity.memory_plan",
    "runtime.supervision.memory.growth",
    "runtime.supervision.memory.ladder",
    "runtime.supervision.memory.policy",
    "runtime.supervision.memory.prediction",
    "runtime.supervision.memory.rungs",
    "runtime.supervision.memory.sentences",
    "runtime.record.history",
    "runtime.errors",
    "runtime.launch.config",
    "runtime.launch.script",
    "runtime.launch.sources.environment_variables",
    "runtime.launch.sources.import_path",
    "runtime.launch.sources.local_modules",
    "runtime.launch.sources.syntax",
    "runtime.checkpoints.compatibility",
    "runtime.staging.draining.drain_messages",
)
HEAVY = frozenset(
    {"torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "numpy", "matplotlib"}
)
OUTSIDE_WORLD = frozenset(
    [
        "asyncio", "ctypes", "fcntl", "io", "logging", "mmap", "multiprocessing", "os", "psutil", "random",
        "select", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib",
    ]
)  # fmt: skip
READS_THE_SCRIPT = {"runtime.launch.script": {"os"}, "runtime.launch.sources.import_path": {"os"}}
"""The first finds the files of modules, the second evaluates `os.path` in a source."""
LIGHT = (
    "trainers.exclusion.outputs",
    "trainers.exclusion.selection",
    "trainers.hooks.attach",
    "trainers",
    "runtime.launch.rank_settings",
    "trainers.upstream.trainer_names",
    "trainers.upstream.versions",
    "trainers.caps",
    "trainers.caps.settings",
    "trainers.caps.configuration",
    "trainers.learning.options",
    "cli.main",
    "cli.status",
    "cli.stop",
    "cli.save",
    "cli.checkpoints",
    "cli.housekeeping.ls",
    "cli.housekeeping.rm",
    "cli.housekeeping.gc",
    "cli.housekeeping.resume",
    "runtime.record.status",
    "runtime.processes.forkserver",
)
"""Modules that must import fast: read-only commands, and what the supervisor needs before its ranks."""


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
    folders = ("hooks", "saving", "resuming", "capture", "exact", "rank")
    used = {name for name in FILES if name.startswith(tuple(f"trainers.{folder}." for folder in folders))}
    only_with_injections = {f"trainers.rank.injected.{name}" for name in ("exhaustion", "faults", "injector")}
    named = {word.removeprefix("grpo_run.") for word in imports("trainers.preload")} & FILES.keys()
    loaded = set[str]().union(*(modules_loaded_with(name)[0] for name in named))
    assert used - loaded <= only_with_injections


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


def layer(name: str) -> int:
    """The position of a module's layer inside its package, counted from the top."""
    package, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    if not part:
        return -1
    found = [index for index, parts in enumerate(LAYERS[package]) if part in parts]
    assert len(found) == 1, f"{package}/{part} has no layer: add it to LAYERS"
    return found[0]


def upward_imports() -> set[tuple[str, str]]:
    """(importer, imported) inside one package where the imported module is in a layer above."""
    found = set()
    for name in FILES:
        package = name.partition(".")[0]
        if package not in LAYERS:
            continue
        for imported in edges(name):
            if imported.partition(".")[0] != package:
                continue
            parts = {
                name.split(".")[1] if "." in name else "",
                imported.split(".")[1] if "." in imported else "",
            }
            separate = any(len(parts & group) == 2 for group in INDEPENDENT.get(package, ()))
            if layer(imported) < layer(name) or separate:
                found.add((name, imported))
    return found


def import_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for imported in sorted(graph[name]):
            if imported not in index:
                visit(imported)
                lowest[name] = min(lowest[name], lowest[imported])
            elif imported in stack:
                lowest[name] = min(lowest[name], index[imported])
        if lowest[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return circles


def test_no_import_points_upward_inside_a_package() -> None:
    """Every import inside a package goes to its own layer or to one below."""
    assert upward_imports() == set()


def test_there_is_no_import_circle() -> None:
    """Imports inside functions count too."""
    assert import_circles({name: edges(name) for name in FILES}) == []


def test_the_check_for_circles_finds_one() -> None:
    """Also a circle of three modules; a module that only leads to it is not part of it."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert import_circles(graph) == [["a", "b", "c"]]


def test_pure_modules_use_no_outside_resource() -> None:
    """Decisions depend on their arguments only: no clock, file, process or training library."""
    tops = {name: {word.partition(".")[0] for word in imports(name)} for name in PURE}
    outside = {name: words & (HEAVY | OUTSIDE_WORLD) for name, words in tops.items()}
    assert broken(outside, READS_THE_SCRIPT) == {}


def test_pure_modules_import_pure_modules_only() -> None:
    """An impure module imported by a pure one would make it impure."""
    ours = {name: {word.removeprefix("grpo_run.") for word in imports(name)} & set(FILES) for name in PURE}
    assert broken(ours, {name: {*PURE, "watchdog", "runtime"} for name in PURE}) == {}


def test_light_modules_do_not_import_training_libraries() -> None:
    """Neither directly nor through another module of ours: importing torch takes seconds."""
    assert broken({name: loaded_with(name) & HEAVY for name in (*PURE, *LIGHT)}, {}) == {}


def test_the_import_check_follows_our_own_modules() -> None:
    """The check above can fail: the agent imports torch, and the code that supervises a run imports the agent."""
    assert "torch" in loaded_with("runtime.processes.agent")
    assert "torch" in loaded_with("cli.launching.supervise")
