"""What `--keep` means."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.processes import ProcessStat
from grpo_run.watchdog.run_processes import keeping
from grpo_run.watchdog.run_processes.keeping import matches, without_kept


@pytest.mark.parametrize(
    ("name", "arguments", "pattern", "kept"),
    [
        ("redis-server", "redis-server *:6379", "redis-server", True),
        ("python", "python server.py --port 1", "*server.py*", True),
        ("python", "python server.py --port 1", "server.py", False),  # neither the name nor the whole line
        ("python", "python server.py", "python server.??", True),
        ("redis-server", "redis-server *:6379", "redis", False),
        ("a-very-long-nam", "a-very-long-name-of-a-program", "a-very-long-name-of-a-program", True),
        ("Python", "Python x", "python", False),
        ("python", "grpo-run rank 0/2: server.py", "*server.py*", False),  # a fork of a rank runs no program
        ("python", "grpo-run rank 0/2: server.py", "python", False),
    ],
)
def test_a_name_or_a_pattern_of_the_whole_command_line(
    name: str, arguments: str, pattern: str, kept: bool
) -> None:
    """As the help says."""
    assert matches(name, arguments, ["other", pattern]) is kept


def test_what_a_kept_process_has_started_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its siblings and parents are not."""
    monkeypatch.setattr(keeping, "read_arguments", lambda pid: "")

    def process(pid: int, parent: int, name: str) -> ProcessStat:
        return ProcessStat(
            pid=pid, name=name, state="S", parent=parent, session=1, cpu_seconds=0.0,
            children_cpu_seconds=0.0,
            started_ticks=pid,
        )  # fmt: skip

    table = {
        10: process(10, 1, "shell"), 11: process(11, 10, "server"), 12: process(12, 11, "worker"),
        13: process(13, 10, "other"),
    }  # fmt: skip
    assert set(without_kept(table, ["server"])) == {10, 13}
    assert set(without_kept(table, [])) == {10, 11, 12, 13}
