"""Mutation testing of the modules that decide: change each operator and constant, and see whether a test
fails.

Run with `make mutation`. It works on a copy of the repository, with cosmic-ray from an environment of its
own. One server imports pytest once and forks a process for each mutant, which makes a mutant cost about a
tenth of a cold pytest. Prints one row per module and the changed line of every survivor;
docs/internals/testing.md has the last result and explains survivors.

With `--sample`, at most that many mutants of each module are run: a random choice, the same every time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = {
    "runtime/supervisor/policy.py": "tests/unit/runtime/supervisor/policy",
    "runtime/checkpoints/compatibility.py": "tests/unit/runtime/checkpoints/test_compatibility.py",
    "watchdog/diagnosis/exits.py": "tests/unit/watchdog/diagnosis",
    "watchdog/stalls/deadlines.py": "tests/unit/watchdog/stalls/test_stalls.py",
    "watchdog/deadlocks/positions.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/proof.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/collectives.py": "tests/unit/watchdog/deadlocks",
    "watchdog/deadlocks/_culprit.py": "tests/unit/watchdog/deadlocks",
    "watchdog/diagnosis/_hangs.py": "tests/unit/watchdog/diagnosis",
    "watchdog/waits/proof.py": "tests/unit/watchdog/waits",
    "watchdog/stalls/step_clock.py": "tests/unit/watchdog/stalls/test_stalls.py",
    "watchdog/stalls/late_ranks.py": "tests/unit/watchdog/stalls/test_late_ranks.py",
    "runtime/features/learning_guards/_judge.py": "tests/unit/runtime/features/learning_guards",
}
"""The pure deciders, and the tests that must notice a change."""
EQUIVALENT_OPERATORS = (
    # `X | None` in annotations, which are never evaluated
    "core/ReplaceBinaryOperator_BitOr_.*",
    # identity of enum members and equality are the same; numbers here are small integers
    "core/ReplaceComparisonOperator_(Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot)",
)
"""Operators whose mutants behave as the original in these modules."""
PYTEST = (
    "-q", "-x", "-m", "not full", "-p", "no:randomly", "-p", "no:cacheprovider", "-p",
    "no:unraisableexception",
    "--hypothesis-profile=mutation",
)  # fmt: skip
BASELINE_CPU_SECONDS = 300
MUTANT_CPU_FACTOR, LEAST_MUTANT_CPU_SECONDS = 3, 5
"""A mutant that uses three times the CPU time of the tests without a mutation loops for ever. It is ended,
and counts as noticed. The load of the machine makes no difference."""
MUTANT_SECONDS = 900.0
"""The same for a mutant that waits for ever."""
LOWEST_SCORE = 0.9
PRELOADED = ("anyio.pytest_plugin", "hypothesis.strategies", "pydantic", "pytest_timeout", "xdist.plugin")
"""Imported once, before any fork: what every test imports and no mutation changes."""
SAMPLE_SEED = 20261122


def serve(address: str) -> None:
    """Run pytest in a forked process for each request, and answer with its exit code and its CPU time in
    seconds.

    A request is a list: whether to write bytecode, the limit of CPU time in seconds, and pytest's arguments.
    """
    import pytest

    for name in PRELOADED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        while True:
            connection, _ = server.accept()
            with connection:
                write_bytecode, cpu_seconds, *arguments = json.loads(connection.makefile().readline())
                pid = os.fork()
                if pid == 0:
                    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
                    null = os.open(os.devnull, os.O_RDWR)
                    for descriptor in (0, 1, 2):
                        os.dup2(null, descriptor)
                    sys.dont_write_bytecode = not write_bytecode
                    code = 3
                    try:
                        code = int(pytest.main(arguments))
                    finally:
                        os._exit(code)
                _, status, usage = os.wait4(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                connection.sendall(json.dumps([code, usage.ru_utime + usage.ru_stime]).encode())


def ask(
    address: str, arguments: list[str], *, cpu_seconds: int, write_bytecode: bool = False
) -> tuple[int, float]:
    """The exit code of pytest with these arguments, and its CPU time; cosmic-ray asks once for each
    mutant.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall((json.dumps([write_bytecode, cpu_seconds, *arguments]) + "\n").encode())
        code, used_seconds = json.loads(connection.makefile().read())
        return code, used_seconds


@contextmanager
def serving(copy: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serve at `address` in the copy of the repository; the copy is imported, not the installed package."""
    package = copy / "build" / "mutated" / "grpo_run"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("cli", "dashboards", "runtime", "trainers", "watchdog"):
        (package / name).symlink_to(copy / name)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    with subprocess.Popen(
        [sys.executable, "-P", __file__, "serve", address], cwd=copy, env=environment
    ) as server:
        try:
            deadline = time.monotonic() + 60.0
            while not Path(address).exists():
                assert server.poll() is None, "the test server exited"
                assert time.monotonic() < deadline, "the test server did not start in 60 s"
                time.sleep(0.1)
            yield server
        finally:
            server.send_signal(signal.SIGTERM)


def check_unmutated(copy: Path, module: str, tests: str, address: str) -> int:
    """Run the tests without a mutation, which must pass, and leave bytecode of everything but the module.

    Bytecode halves the time of a mutant. That of the module itself would be taken for a mutant's: it is
    compared by size and by time in whole seconds.

    Returns:
        the limit of a mutant's CPU time, in seconds.
    """
    code, used_seconds = ask(address, [*PYTEST, tests], cpu_seconds=BASELINE_CPU_SECONDS, write_bytecode=True)
    assert code == 0, f"{tests} fails without a mutation"
    source = copy / module
    for cached in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
        cached.unlink()
    return max(LEAST_MUTANT_CPU_SECONDS, round(MUTANT_CPU_FACTOR * used_seconds))


def mutate(
    copy: Path,
    module: str,
    tests: str,
    address: str,
    work: Path,
    cosmic_ray: Path,
    sample: int | None,
    cpu_seconds: int,
) -> tuple[int, int, list[str]]:
    """Run the mutants of one module.

    Args:
        sample: how many of them; all if None.
        cpu_seconds: limit of each.

    Returns:
        mutants that were noticed, mutants that were run, and the changed lines of the survivors.
    """
    name = module.replace("/", "-").removesuffix(".py")
    config, session = work / f"{name}.toml", work / f"{name}.sqlite"
    command = [sys.executable, "-I", "-S", __file__, "ask", address, str(cpu_seconds), *PYTEST, tests]
    config.write_text(
        f"[cosmic-ray]\nmodule-path = {json.dumps(module)}\ntimeout = {MUTANT_SECONDS}\nexcluded-modules ="
        f" []\ntest-command = {json.dumps(shlex.join(command))}\n[cosmic-ray.distributor]\nname ="
        ' "local"\n[cosmic-ray.filters.operators-filter]\nexclude-operators ='
        f" {json.dumps(EQUIVALENT_OPERATORS)}\n"
    )

    def run(program: str, *arguments: str | Path) -> None:
        subprocess.run([cosmic_ray / program, *arguments], cwd=copy, check=True, capture_output=True)

    run("cosmic-ray", "init", config, session)
    run("cr-filter-operators", session, config)
    if sample is not None:
        leave_out_all_but(session, sample)
    run("cosmic-ray", "exec", config, session)
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


def leave_out_all_but(session: Path, number: int) -> None:
    """Mark mutants of a session as skipped, until only a random sample of this size is left."""
    with sqlite3.connect(session) as database:
        left = database.execute(
            "select job_id from mutation_specs where job_id not in (select job_id from work_results)"
            " order by operator_name, occurrence"
        ).fetchall()
        random.Random(SAMPLE_SEED).shuffle(left)
        database.executemany(
            "insert into work_results (job_id, worker_outcome) values (?, 'SKIPPED')", left[number:]
        )


def main(cosmic_ray: Path, only: str = "", sample: int | None = None) -> int:
    """Mutate every module whose path contains `only`; the exit code is 1 when one scores below 90 %."""
    scores: list[tuple[int, int]] = []
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-mutation-") as folder:
        work = Path(folder)
        copy, address = work / "copy", str(work / "socket")
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "build", "runs", "runs-output", "__pycache__", "demo-out"
        )
        shutil.copytree(REPOSITORY, copy, ignore=ignored)
        with serving(copy, address) as server:
            print("| module | mutants | noticed | score |\n|---|---|---|---|", flush=True)
            for module, tests in MODULES.items():
                if only not in module:
                    continue
                limit = check_unmutated(copy, module, tests, address)
                noticed, mutants, left = mutate(copy, module, tests, address, work, cosmic_ray, sample, limit)
                assert server.poll() is None, "the test server exited"
                scores.append((noticed, mutants))
                survivors += left
                print(f"| `{module}` | {mutants} | {noticed} | {noticed / mutants:.0%} |", flush=True)
    noticed, mutants = (sum(column) for column in zip(*scores, strict=True))
    print(f"| all | {mutants} | {noticed} | {noticed / mutants:.0%} |\n")
    print("\n".join(survivors))
    return 0 if all(noticed >= LOWEST_SCORE * mutants for noticed, mutants in scores) else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "ask":
        sys.exit(ask(sys.argv[2], sys.argv[4:], cpu_seconds=int(sys.argv[3]))[0])
    else:
        options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        options.add_argument("cosmic_ray", type=Path, help="folder of the program cosmic-ray")
        options.add_argument("only", nargs="?", default="", help="part of the path of modules to mutate")
        options.add_argument("--sample", type=int, help="mutants per module; all by default")
        given = options.parse_args()
        sys.exit(main(given.cosmic_ray.resolve(), given.only, given.sample))
