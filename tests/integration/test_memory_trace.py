"""`--memory-trace`: the container that keeps tensors of ever more steps is named with its line."""

from __future__ import annotations

from support.runs import SCRIPTS, Runs

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

SOURCE = SCRIPTS / "kept_memory.py"


def test_a_leak_of_one_rank_is_named_with_it_and_said_once_in_a_run(runs: Runs) -> None:
    """Not again after a restart, in which it is found again; the status says in how many attempts."""
    run = runs(
        "--nproc-per-node", "2", "--memory-trace", str(SOURCE), "--output-dir", ".",
        "--max-steps", "50", "--on-rank", "1", "--die-at", "24", "--keep-graph",
    )  # fmt: skip
    run.start().ended()
    found = run.events("memory_finding")
    assert [(one["attempt"], one["rank"]) for one in found] == [(0, 1), (1, 1)]
    line = SOURCE.read_text().splitlines().index("def main() -> None:") + 1
    for one in found:
        name, _, place = one["key"].partition(" (")
        assert name == "list `old_log_probabilities` in main()"
        assert place.endswith(f"{SOURCE.name}:{line})")
        assert one["steps"] >= 20
    assert run.output.read_text().count("memory: ") == 1
    assert f"memory: rank 1: {found[0]['sentence']}" in run.output.read_text()
    (listed,) = run_reader(RunDirectory(path=run.directory)).history().notes()
    assert listed == f"memory: rank 1: {found[0]['sentence']} (found in 2 attempts)"
