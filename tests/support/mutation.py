"""Mutation testing of the modules that decide: change each operator and constant, and see whether a test fails.

Run with `make mutation`. It works on a copy of the repository, with cosmic-ray from an environment of its own. One
server imports pytest once and forks a process for each mutant, which makes a mutant cost about a tenth of a cold pytest.
Prints one row per module and the diff of every survivor; docs/testing.md has the last result and explains survivors.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = {
    "runtime/supervision/policy.py": "tests/unit/runtime/supervision/test_policy.py",
    "runtime/checkpoints/compatibility.py": "tests/unit/runtime/checkpoints/test_compatibility.py",
    "watchdog/diagnosis/exits.py": "tests/unit/watchdog/diagnosis",
    "watchdog/stalls/deadlines.py": "tests/unit/watchdog/stalls/test_deadlines.py",
    "watchdog/deadlocks/positions.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/proof.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/completion.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/threads.py": "tests/unit/watchdog/deadlocks",
    "watchdog/waits/proof.py": "tests/unit/watchdog/waits",
}
"""The pure deciders, and the tests that must notice a change."""
EQUIVALENT_OPERATORS = (
    # `X | None` in annotations, which are never evaluated
    "core/ReplaceBinaryOperator_BitOr_.*",
    # identity of enum members and equality are the same; numbers here are small integers
    "core/ReplaceComparisonOperator_(Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot)",
)
"""Operators whose mutants behave as the original in these modules."""
PYTEST = ("-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider")
MUTANT_CPU_SECONDS = 12
"""A mutant that loops for ever is ended, and counts as noticed."""
MUTANT_SECONDS = 60.0
LOWEST_SCORE = 0.9


def serve(address: str) -> None:
    """Answer each request, a list of pytest arguments, with the exit code of a forked pytest."""
    import hypothesis.strategies  # noqa: F401 - imported once, before any fork
    import pytest

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        while True:
            connection, _ = server.accept()
            with connection:
                arguments = json.loads(connection.makefile().readline())
                pid = os.fork()
                if pid == 0:
                    resource.setrlimit(resource.RLIMIT_CPU, (MUTANT_CPU_SECONDS, MUTANT_CPU_SECONDS))
                    null = os.open(os.devnull, os.O_RDWR)
                    for descriptor in (0, 1, 2):
                        os.dup2(null, descriptor)
                    code = 3
                    try:
                        code = int(pytest.main(arguments))
                    finally:
                        os._exit(code)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                connection.sendall(str(code if code >= 0 else 99).encode())


def ask(address: str, arguments: list[str]) -> int:
    """The exit code of pytest with these arguments; what cosmic-ray runs for each mutant."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall((json.dumps(arguments) + "\n").encode())
        return int(connection.recv(16) or b"98")


def mutate(
    copy: Path, module: str, tests: str, address: str, work: Path, cosmic_ray: Path
) -> tuple[int, int, list[str]]:
    """Run every mutant of one module.

    Returns:
        mutants that were noticed, mutants in all, and the diffs of the survivors.
    """
    name = module.replace("/", "-").removesuffix(".py")
    config, session = work / f"{name}.toml", work / f"{name}.sqlite"
    command = [sys.executable, "-I", "-S", __file__, "ask", address, *PYTEST, tests]
    config.write_text(
        f"[cosmic-ray]\nmodule-path = {json.dumps(module)}\ntimeout = {MUTANT_SECONDS}\nexcluded-modules = []\n"
        f"test-command = {json.dumps(' '.join(command))}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
        f"[cosmic-ray.filters.operators-filter]\nexclude-operators = {json.dumps(EQUIVALENT_OPERATORS)}\n"
    )
    for program, *rest in (
        ("cosmic-ray", "init", config, session),
        ("cr-filter-operators", session, config),
        ("cosmic-ray", "exec", config, session),
    ):
        subprocess.run([cosmic_ray / program, *rest], cwd=copy, check=True, capture_output=True)
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "select r.test_outcome, s.start_pos_row, r.diff from mutation_specs s join work_results r"
            " on s.job_id = r.job_id where r.worker_outcome != 'SKIPPED' order by s.start_pos_row"
        ).fetchall()
    survivors = [
        f"{module}:{row}: "
        + next((line[1:].strip() for line in (diff or "").splitlines()[3:] if line.startswith("+")), "")
        for outcome, row, diff in rows
        if outcome == "SURVIVED"
    ]
    return len(rows) - len(survivors), len(rows), survivors


def main(cosmic_ray: Path, only: str = "") -> int:
    """Mutate every module whose path contains `only`; the exit code is 1 when the score is below 90 %."""
    killed = total = 0
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-mutation-") as folder:
        work = Path(folder)
        copy = work / "copy"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "build", "runs", "runs-output", "__pycache__", "demo-out"
        )
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        # the copy is imported, not the installed package
        package = copy / "build" / "mutated" / "grpo_run"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        for name in ("cli", "dashboards", "runtime", "trainers", "watchdog"):
            (package / name).symlink_to(copy / name)
        address = str(work / "socket")
        environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", address], cwd=copy, env=environment
        ) as server:
            try:
                deadline = time.monotonic() + 60.0
                while not Path(address).exists():
                    assert server.poll() is None, "the test server exited"
                    assert time.monotonic() < deadline, "the test server did not start in 60 s"
                    time.sleep(0.1)
                print("| module | mutants | noticed | score |\n|---|---|---|---|", flush=True)
                for module, tests in MODULES.items():
                    if only not in module:
                        continue
                    assert ask(address, [*PYTEST, tests]) == 0, f"{tests} fails without a mutation"
                    noticed, mutants, left = mutate(copy, module, tests, address, work, cosmic_ray)
                    killed, total = killed + noticed, total + mutants
                    survivors += left
                    print(f"| `{module}` | {mutants} | {noticed} | {noticed / mutants:.0%} |", flush=True)
            finally:
                server.send_signal(signal.SIGTERM)
    print(f"| all | {total} | {killed} | {killed / total:.0%} |\n")
    print("\n".join(survivors))
    return 0 if killed >= LOWEST_SCORE * total else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "ask":
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
