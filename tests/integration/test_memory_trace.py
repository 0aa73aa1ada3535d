"""`--memory-trace`: what scripts keep without need is named by line and holder; nothing is said of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from support.runs import SCRIPTS, Run, Runs

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

SCRIPT = "kept_memory.py"
INIT = "def __init__(self) -> None:"
FOUND = {
    "graph": ("graph", "", "list `old_log_probabilities` in main()", "def main()"),
    "rollouts": ("growing", '"tokens": tokens.clone()', "list `history` of Collector", INIT),
    "logits": ("growing", "logits.detach().clone()", "list `kept_logits` of Collector", INIT),
}
"""By way of keeping: the kind of the finding, the line that makes it, the holder, and the line that this
begins at. The tensors of a graph are made in several lines of the generation."""
GROWING = ("rollouts", "logits")
LONG = 34
"""Steps of a script that grows: 20 after the first ones, and some more until the next look."""


def lines_of(text: str) -> list[int]:
    """The lines of the script with a text."""
    lines = (SCRIPTS / SCRIPT).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line]


def check(finding: dict[str, Any], way: str) -> None:
    """A finding names the line that makes what is kept, and the holder with its line."""
    kind, made, holder, held = FOUND[way]
    assert (finding["kind"], finding["holder"]) == (kind, holder)
    if way == "graph":
        assert finding["made_at"]["function"] == "generate"
    else:
        assert finding["made_at"]["line"] in lines_of(made)
    assert finding["held_at"]["line"] in lines_of(held)
    for place in (finding["made_at"], finding["held_at"]):
        assert place["file"].endswith(SCRIPT)
    assert finding["steps"] >= (20 if way in GROWING else 5)


def findings(run: Run, *ways: str, steps: int = 16) -> list[dict[str, Any]]:
    """Run the script to its end, and return what was found."""
    run.arguments = [
        "--memory-trace", str(SCRIPTS / SCRIPT), "--output-dir", "out", "--max-steps", str(steps),
        *(("--keep", *ways) if ways else ()),
    ]  # fmt: skip
    run.start().ended()
    return run.events("memory_finding")


def find_all(found: list[dict[str, Any]], ways: Iterable[str]) -> None:
    """Each way is found, and nothing else."""
    by_holder = {finding["holder"]: finding for finding in found}
    assert sorted(by_holder) == sorted(FOUND[way][2] for way in ways)
    assert len(by_holder) == len(found)
    for way in ways:
        check(by_holder[FOUND[way][2]], way)


def test_a_kept_graph_is_on_the_terminal(runs: Runs) -> None:
    """Its finding is an alarm, and the replay buffer is none."""
    run = runs()
    found = findings(run, "graph")
    find_all(found, ["graph"])
    assert f"memory: {found[0]['sentence']}" in run.output.read_text()


def test_what_merely_grows_is_in_the_status_and_not_on_the_terminal(runs: Runs) -> None:
    """Once it has tensors of 20 steps: a buffer that is not full yet looks the same."""
    run = runs()
    found = findings(run, *GROWING, steps=LONG)
    find_all(found, GROWING)
    assert "memory: " not in run.output.read_text()
    listed = run_reader(RunDirectory(path=run.directory)).history().notes()
    assert sorted(listed) == sorted(f"memory: {finding['sentence']}" for finding in found)


def test_nothing_is_found_in_a_script_with_a_bounded_buffer(runs: Runs) -> None:
    """Nothing grows in it."""
    assert findings(runs(), steps=LONG) == []


def test_a_leak_of_one_rank_is_named_with_it_and_said_once_in_a_run(runs: Runs) -> None:
    """Not again after a restart, in which it is found again; the status says in how many attempts."""
    run = runs(
        "--nproc-per-node", "2", "--memory-trace", str(SCRIPTS / SCRIPT), "--output-dir", ".",
        "--max-steps", "16", "--mode", "ddp", "--on-rank", "1", "--die-at", "14", "--keep", "graph",
    )  # fmt: skip
    run.start().ended()
    found = run.events("memory_finding")
    assert [(one["attempt"], one["rank"]) for one in found] == [(0, 1), (1, 1)]
    for one in found:
        check(one, "graph")
    assert run.output.read_text().count("memory: ") == 1
    assert f"memory: rank 1: {found[0]['sentence']}" in run.output.read_text()
    (listed,) = run_reader(RunDirectory(path=run.directory)).history().notes()
    assert listed == f"memory: rank 1: {found[0]['sentence']} (found in 2 attempts)"
