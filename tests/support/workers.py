"""How tests are distributed over pytest-xdist's workers, and in which order.

Each worker imports and rewrites every test file that it collects, which for all unit tests takes longer than
many of their tests. If all of `tests/unit` is asked for, each worker therefore collects and runs only its
share of it. Other tests are collected by all workers and given out as workers become free; xdist's
`loadgroup` does the same by marks, but version 3.8 ignores them with pytest 9.2.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import EachScheduling, LoadScopeScheduling

UNIT = Path(__file__).parents[1] / "unit"
RUNTIME = UNIT / "runtime"
RANK, FEATURES = RUNTIME / "rank", RUNTIME / "features"
DIVIDED = (UNIT, RUNTIME, RANK, FEATURES)
"""Folders whose entries are given out one by one."""
NEED_TORCH = (
    RANK, FEATURES, RUNTIME / "checkpoints", RUNTIME / "launch", RUNTIME / "planning", RUNTIME / "upstream",
    UNIT / "trainers",
)  # fmt: skip
"""Folders of which most tests import torch, or one accelerate or transformers."""
SECONDS = {
    "cli": 14, "dashboards": 9, "watchdog": 6, "test_documentation.py": 1.5, "trainers": 5.5,
    "runtime/checkpoints": 2.5, "runtime/launching": 4, "runtime/planning": 4, "runtime/supervisor": 13.5,
    "runtime/upstream": 2.5, "runtime/features/agent_tools": 2.5, "runtime/features/caps": 6,
    "runtime/features/masking": 3, "runtime/features/phase_growth": 2, "runtime/features/reward_workers": 5,
    "runtime/rank/saving": 2, "runtime/rank/test_host_snapshots.py": 2.5, "runtime/rank/test_restoring.py": 1,
}  # fmt: skip
"""CPU time of the slowest folders and files of `tests/unit`, with child processes; `dashboards` waits too."""
BYTES_PER_SECOND = 30_000
"""Size of the other test files by their CPU time."""
SESSION = pytest.StashKey[pytest.Session]()

IMPORTING = (
    "integration/test_memgen.py",
    "integration/test_memory_prediction.py",
    "integration/test_memory_traces.py",
    "integration/test_planned_scripts.py",
    "integration/test_torture_files.py",
)
"""Files of real tests that import torch, transformers or TRL into pytest itself: one worker runs them all.

Without `test_reward_workers.py`, whose workers are forks of pytest with a limit of memory."""
TOGETHER = (
    "integration/test_bad_input.py",
    "integration/test_fresh_interpreter.py",
    "integration/test_prometheus.py",
    "integration/test_rank_is_torchruns.py",
    "integration/test_reward_workers.py",
    "integration/test_wait_states.py",
    "integration/test_wheel.py",
    "browser/test_report.py",
    "fault/test_torture.py",
)
"""Files of real tests with expensive module fixtures: one worker runs all tests of a file."""
LONGEST_FIRST = (
    "test_hangs_end",
    *IMPORTING,
    "test_launch_call.py",
    "test_reward_workers.py",
    "hosts/test_lost_peers.py",
    "test_adding_a_feature.py",
    "test_one_rank_asks.py",
    "test_prometheus.py",
    "test_rank_is_torchruns.py",
    "test_an_unmodified_script_whose_reward_hangs",
    "test_left_processes.py",
    "test_stuck_disk.py",
    "test_a_trl_script_prints_and_trains",
    "test_trackers.py",
    "test_memgen",
    "test_run_directory_on_a_full_disk",
    "test_parallel_modes.py",
    "test_torture.py",
    "test_deadlocks.py",
    "test_alertmanager.py",
    "test_collective_records.py",
    "test_stop_saves",
    "test_healthy_oddities.py",
    "test_hang_matrix.py",
    "test_equality.py",
    "test_supervisor_failure.py",
    "hosts/test_snapshots.py",
    "test_neighbours.py",
    "test_wait_states.py",
    "test_bad_input.py",
    "test_fresh_interpreters",
    "test_identity.py",
    "test_disk_full.py",
    "integration/test_growth.py",
    "test_hangs.py",
    "test_stuck_generation.py",
    "test_lost_steps.py",
    "test_two_nodes.py",
    "test_report.py",
    "test_memory_plans.py",
)
"""Parts of the ids of long tests. They start first, so that no worker waits for one at the end."""


class Scheduling(LoadScopeScheduling):
    """Gives out unit tests and `TOGETHER` by file, `IMPORTING` at once, all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.endswith(IMPORTING):
            return "importing"
        return file if "tests/unit/" in nodeid or file.endswith(TOGETHER) else nodeid


class Shares(EachScheduling):
    """Lets each worker run all that it has collected."""

    def schedule(self) -> None:
        super().schedule()
        # xdist counts the tests of the last worker only; the progress is shown in percent of all
        self.config.stash[SESSION].testscollected = sum(map(len, self.node2collection.values()))


def only_unit_tests(config: pytest.Config) -> bool:
    """Whether unit tests are asked for, and nothing else."""
    return all(UNIT in [path := Path(argument).absolute(), *path.parents] for argument in config.args)


def only_real_tests(config: pytest.Config) -> bool:
    """Whether no unit tests are asked for."""
    paths = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    return not any(UNIT in (path, *path.parents) or path in UNIT.parents for path in paths)


def all_unit_tests(config: pytest.Config) -> bool:
    """Whether all unit tests are asked for, and nothing else."""
    return [Path(argument).absolute() for argument in config.args] == [UNIT]


@functools.cache
def shares(count: int) -> list[set[Path]]:
    """Divide the folders and files in `tests/unit` into `count` shares of about equal CPU time.

    Once: it is asked for each entry of the folders, and reads all of them.

    What needs torch is divided into two parts, so that the other workers do not import it.
    """
    entries = [entry for folder in DIVIDED for entry in sorted(folder.iterdir()) if entry not in DIVIDED]
    parts = [{entry} for entry in entries if not _needs_torch(entry)]
    first, second = set[Path](), {entry for entry in entries if _needs_torch(entry)}
    whole = _seconds(second)
    for entry in sorted(second):
        if 2 * _seconds(first) < whole:
            first.add(entry)
            second.remove(entry)
    made: list[set[Path]] = [set() for _ in range(count)]
    for part in sorted([first, second, *parts], key=_seconds, reverse=True):
        min(made, key=_seconds).update(part)
    return made


def _needs_torch(entry: Path) -> bool:
    return any(folder in (entry, *entry.parents) for folder in NEED_TORCH)


def _seconds(entries: set[Path]) -> float:
    """Return about how much CPU time these tests take."""
    return sum(
        SECONDS.get(str(entry.relative_to(UNIT)), _bytes(entry) / BYTES_PER_SECOND) for entry in entries
    )


def _bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in [entry, *entry.rglob("test_*.py")] if file.is_file())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the session for the scheduler."""
    session.config.stash[SESSION] = session


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip what is in the share of another worker."""
    worker = getattr(config, "workerinput", None)
    if (
        worker is None
        or collection_path.parent not in DIVIDED
        or collection_path in DIVIDED
        or not all_unit_tests(config)
    ):
        return None
    own = shares(worker["workercount"])[int(worker["workerid"].removeprefix("gw")) % worker["workercount"]]
    return None if collection_path in own else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; pytest-randomly decides the order of the others."""

    def place(item: pytest.Item) -> int:
        found = (index for index, part in enumerate(LONGEST_FIRST) if part in item.nodeid)
        return next(found, len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | Shares:
    """Called by xdist in the controller."""
    config.option.loadscopereorder = False  # it starts with the files of most tests
    return Shares(config, log) if all_unit_tests(config) else Scheduling(config, log)
