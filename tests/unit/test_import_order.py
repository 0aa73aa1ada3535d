"""The arrows between the folders, and what may be imported where: read from the sources, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ALLOWED = {
    "watchdog": {"watchdog"},
    "runtime": {"runtime", "watchdog"},
    "trainers": {"trainers", "runtime", "watchdog"},
    "dashboards": {"dashboards", "runtime", "watchdog"},
    "cli": {"cli", "dashboards", "trainers", "runtime", "watchdog"},
}
PURE = (
    "watchdog.causes",
    "watchdog.deadlocks.collectives",
    "watchdog.deadlocks.culprit",
    "watchdog.stalls.deadlines",
    "watchdog.deadlocks.proof",
    "watchdog.diagnosis.exits",
    "watchdog.stalls.durations",
    "watchdog.observation",
    "watchdog.deadlocks.sentences",
    "watchdog.stalls.detection",
    "watchdog.stalls.exit_hangs",
    "watchdog.stalls.nested_phases",
    "watchdog.stalls.overdue",
    "watchdog.stalls.sentences",
    "watchdog.stalls.stall",
    "watchdog.stalls.stragglers",
    "watchdog.deadlocks.deadlock",
    "watchdog.deadlocks.history",
    "watchdog.deadlocks.positions",
    "watchdog.deadlocks.recording",
    "watchdog.rank_names",
    "watchdog.evidence.timeline",
    "watchdog.verdict",
    "runtime.record.commits",
    "runtime.launch.injection",
    "runtime.record.failure_rate",
    "runtime.supervision.lifecycle",
    "runtime.supervision.policy",
    "runtime.record.history",
    "runtime.errors",
    "runtime.launch.config",
    "runtime.launch.script",
    "runtime.checkpoints.compatibility",
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
READS_THE_SCRIPT = {"runtime.launch.script": {"os"}}
"""`runtime.launch.script` has one function that reads the script's source and one that looks where modules lie."""
LIGHT = (
    "trainers.hooks.attach",
    "trainers",
    "runtime.launch.rank_settings",
    "trainers.upstream",
    "trainers.hooks.caps",
    "cli.main",
    "cli.status",
    "cli.stop",
    "cli.save",
    "cli.checkpoints",
    "runtime.record.status",
    "runtime.processes.forkserver",
)
"""What must start fast: commands that only look, and what the supervisor needs before its ranks."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of ours: dotted name without `grpo_run.`, and its file."""
    for folder in ALLOWED:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


FILES = dict(sources())


def nodes(tree: ast.AST, *, module_level: bool) -> Iterator[ast.AST]:
    """All nodes, or those that run when the module is imported (functions' bodies and type-only blocks left out)."""
    for child in ast.iter_child_nodes(tree):
        if module_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if module_level and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from nodes(child, module_level=module_level)


def imports(name: str, *, module_level: bool = False) -> set[str]:
    """Dotted names that a module of ours imports; of `from a import b` both `a` and `a.b`."""
    path = FILES[name]
    package = ["grpo_run", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    found: set[str] = set()
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), module_level=module_level):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]).strip(".")
            module = base if node.level else (node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def loaded_with(name: str) -> set[str]:
    """Top-level names of everything foreign that importing this module of ours imports, ours followed."""
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
    return foreign


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_arrow_points_the_wrong_way(name: str) -> None:
    """watchdog <- runtime <- {trainers, dashboards} <- cli, and no other arrow, in functions' bodies too."""
    folder = name.partition(".")[0]
    reached = {word.split(".")[1] for word in imports(name) if word.startswith("grpo_run.")}
    assert reached <= ALLOWED[folder]


@pytest.mark.parametrize("name", sorted(FILES))
def test_nobody_imports_a_bare_folder(name: str) -> None:
    """`import watchdog` would find another project's package, or a second copy of ours."""
    assert {word.partition(".")[0] for word in imports(name)} & set(ALLOWED) == set()


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_reach_for_nothing(name: str) -> None:
    """Decisions are functions of what they are given: no clock, file, process or training library."""
    tops = {word.partition(".")[0] for word in imports(name)}
    assert tops & (HEAVY | OUTSIDE_WORLD) - READS_THE_SCRIPT.get(name, set()) == set()


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_lean_on_pure_modules_only(name: str) -> None:
    """A pure module that imported an impure one of ours would be pure in name only."""
    ours = {
        word.removeprefix("grpo_run.") for word in imports(name) if word.removeprefix("grpo_run.") in FILES
    } - {"watchdog", "runtime"}
    assert ours <= set(PURE)


@pytest.mark.parametrize("name", [*PURE, *LIGHT])
def test_light_modules_do_not_import_training_libraries(name: str) -> None:
    """Neither at once nor through another module of ours: torch alone costs seconds."""
    assert loaded_with(name) & HEAVY == set()


def test_the_closure_sees_through_our_own_modules() -> None:
    """The check above can fail: the agent does import torch, and the launch command leads to it."""
    assert "torch" in loaded_with("runtime.processes.agent")
    assert "torch" in loaded_with("cli.launch")
