"""Mutation testing of the modules that decide: change each operator and constant, and see whether a test
fails.

Run with `make mutation`. It works on a copy of the repository, with cosmic-ray from an environment of its
own, and starts pytest anew for each mutant. Prints one row per module and the changed line of every survivor;
docs/internals/testing.md has the last result and explains survivors.

With `--sample`, at most that many mutants of each module are run: a random choice, the same every time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "dashboards", "runtime", "trainers", "watchdog")
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
    sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:randomly", "-p",
    "no:cacheprovider", "-p", "no:unraisableexception", "--hypothesis-profile=mutation",
)  # fmt: skip
MUTANT_SECONDS = 300.0
"""A mutant that takes longer loops or waits for ever. It counts as noticed."""
LOWEST_SCORE = 0.9
SAMPLE_SEED = 20261122


def copied(work: Path) -> tuple[Path, dict[str, str]]:
    """Copy the repository; return the copy, and an environment in which it is imported, not the installed
    package.
    """
    copy = work / "copy"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "runs", "runs-output", "__pycache__", "demo-out", "grpo_run"
    )  # `grpo_run` is what an editable installation leaves: it would be imported in place of the copy
    shutil.copytree(REPOSITORY, copy, ignore=ignored)
    package = copy / "build" / "mutated" / "grpo_run"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in PACKAGES:
        (package / name).symlink_to(copy / name)
    return copy, {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def mutate(
    copy: Path, environment: dict[str, str], module: str, work: Path, programs: Path, sample: int | None
) -> tuple[int, int, list[str]]:
    """Run the mutants of one module, or a sample of them.

    Returns:
        mutants that were noticed, mutants that were run, and the changed lines of the survivors.
    """
    name = module.replace("/", "-").removesuffix(".py")
    config, session = work / f"{name}.toml", work / f"{name}.sqlite"
    command = [*PYTEST, MODULES[module]]
    subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True)  # it passes without
    text = (copy / module).read_text()
    (copy / module).write_text("raise AssertionError")
    if subprocess.run(command, cwd=copy, env=environment, check=False, capture_output=True).returncode == 0:
        raise AssertionError(f"the tests of {module} import another copy of it")
    (copy / module).write_text(text)
    config.write_text(
        f"[cosmic-ray]\nmodule-path = {json.dumps(module)}\ntimeout = {MUTANT_SECONDS}\n"
        f"excluded-modules = []\ntest-command = {json.dumps(shlex.join(command))}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
        f"[cosmic-ray.filters.operators-filter]\nexclude-operators = {json.dumps(EQUIVALENT_OPERATORS)}\n"
    )

    def run(program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [programs / program, *arguments], cwd=copy, env=environment, check=True, capture_output=True
        )

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


def main(programs: Path, only: str, sample: int | None) -> int:
    """Mutate every module whose path contains `only`; the exit code is 1 when one scores below 90 %."""
    scores: list[tuple[int, int]] = []
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-mutation-") as folder:
        copy, environment = copied(Path(folder))
        print("| module | mutants | noticed | score |\n|---|---|---|---|", flush=True)
        for module in (module for module in MODULES if only in module):
            noticed, mutants, left = mutate(copy, environment, module, Path(folder), programs, sample)
            scores.append((noticed, mutants))
            survivors += left
            print(f"| `{module}` | {mutants} | {noticed} | {noticed / mutants:.0%} |", flush=True)
    print("", *survivors, sep="\n")
    return 0 if all(noticed >= LOWEST_SCORE * mutants for noticed, mutants in scores) else 1


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("cosmic_ray", type=Path, help="folder of the program cosmic-ray")
    options.add_argument("only", nargs="?", default="", help="part of the path of modules to mutate")
    options.add_argument("--sample", type=int, help="mutants per module; all by default")
    given = options.parse_args()
    sys.exit(main(given.cosmic_ray.resolve(), given.only, given.sample))
