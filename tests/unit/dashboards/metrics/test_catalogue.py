"""Metrics follow the naming conventions, and labels have bounded sets of values."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.journal import as_event
from support.transcripts import Story, stories

from grpo_run.dashboards.metrics.catalogue import (
    ACTIONS,
    ALL_METRICS,
    CAUSES,
    DECIDED_ACTIONS,
    INCIDENT_CAUSES,
    OUTCOMES,
    PHASES,
    RANK_STATES,
    RUN_METRICS,
    RUN_STATES,
)  # fmt: skip
from grpo_run.runtime.features import modules
from grpo_run.runtime.features.learning_guards.settings import LearningGuard
from grpo_run.runtime.features.masking.events import MaskingReason
from grpo_run.runtime.features.rollout_server.events import SampleOrigin
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.history.totals import CheckpointResult
from grpo_run.runtime.history.wall_states import WallState
from grpo_run.runtime.memory.gpus import THROTTLED
from grpo_run.runtime.metrics import Metric, RunObservation
from grpo_run.watchdog.observation import EndReason, Slot
from grpo_run.watchdog.stalls.durations import HISTOGRAM_EDGES_SECONDS

REPOSITORY = Path(__file__).parents[4]


def observation_of(status: RunStatus) -> RunObservation:
    """An observation of the status at 1000 s of monotonic time."""
    return RunObservation(
        status=status, slots=status.slots, first_rank=0, monotonic_seconds=1000.0, wall_seconds=200.0
    )


def samples(name: str, observation: RunObservation) -> dict[tuple[str, ...], float | None]:
    """The samples of one metric of the catalogue, by label values."""
    (metric,) = [metric for metric in RUN_METRICS if metric.name == name]
    return {
        labels: float(value) if isinstance(value, (bool, int)) else value
        for labels, value in metric.samples(observation)
    }


def members_used(tree: ast.AST, enum: str) -> Iterator[str]:
    """Names of the members of an enum to which the source refers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum:
            yield node.attr


def sources(enum: str, *folders: str) -> Iterator[ast.Module]:
    """The syntax trees of all modules in these folders that use an enum."""
    for folder in folders:
        for path in (REPOSITORY / folder).rglob("*.py"):
            if f"{enum}." in (text := path.read_text(encoding="utf-8")):
                yield ast.parse(text)


def test_every_cause_of_a_verdict_is_exported_and_no_other() -> None:
    """A cause that no verdict uses has no series."""
    trees = sources(
        "Cause", "watchdog", "runtime/supervisor/detection", "runtime/supervisor", "runtime/features"
    )
    used = {name for tree in trees for name in members_used(tree, "Cause")}
    assert used == {cause.name for cause in INCIDENT_CAUSES}


def test_every_action_that_is_decided_is_exported_and_no_other() -> None:
    """An action that no function of the supervision decides has no series."""
    nodes = (
        node
        for tree in sources("Action", "runtime/supervisor", "runtime/features")
        for node in ast.walk(tree)
    )
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    used = {name for function in functions for name in members_used(function, "Action")}
    of_features = {action for module in modules("shown") for action in module.ACTIONS}
    assert used | of_features == set(map(str, DECIDED_ACTIONS))


def test_names_are_unique() -> None:
    """Each metric has its own name."""
    assert len({metric.name for metric in ALL_METRICS}) == len(ALL_METRICS)


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_name_follows_the_conventions(metric: Metric[Any]) -> None:
    """Names have the prefix, only counters end in _total, and names of durations and sizes end in their
    unit.
    """
    assert re.fullmatch(r"grpo_[a-z_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    for unit in ("seconds", "bytes"):
        assert metric.name.removesuffix("_total").endswith(f"_{unit}") == (metric.unit == unit)
    assert metric.help.endswith(".")
    assert "run_id" not in metric.labels


def series_of(shell: SamplesShell, ranks: int) -> dict[str, int]:
    """The number of series of each metric, of a run with so many ranks and of all that has a limit."""
    shell.status(*["{}"] * ranks)
    own = {str(number): (20, 10 + number) for number in range(12)}
    shell.run = replace(shell.run, collectives=dict.fromkeys(range(ranks), own))
    shell.functions("20")
    observation = observation_of(shell.run)
    parts = {"histogram": len(HISTOGRAM_EDGES_SECONDS) + 3}
    return {
        metric.name: len(list(metric.samples(observation))) * parts.get(metric.kind, 1)
        for metric in RUN_METRICS
    }


def test_the_number_of_series_is_bounded(make_slot: Any, make_status: Any) -> None:
    """Eight ranks and a GPU give fewer than 1120 series without histograms, each further rank at most 101.

    Histograms are never by rank: 14 phases and 4 other durations of 27 series.
    """
    shell = SamplesShell(make_slot, make_status)
    eight = series_of(shell, 8)
    histograms = {metric.name for metric in ALL_METRICS if metric.kind == "histogram"}
    assert all(eight.values())
    assert sum(eight[name] for name in histograms) == (14 + 4) * 27
    assert sum(eight.values()) - (14 + 4) * 27 < 1120
    growth = sum(series_of(shell, 9).values()) - sum(eight.values())
    assert growth == sum(series_of(shell, 3).values()) - sum(series_of(shell, 2).values())
    assert 90 < growth <= 101


CLOSED = {
    "state": {*RUN_STATES, *RANK_STATES, *(state.value for state in WallState)},
    "phase": {*PHASES},
    "cause": {*CAUSES},
    "action": {*ACTIONS},
    "outcome": {*OUTCOMES},
    "result": {result.value for result in CheckpointResult},
    "guard": {guard.value for guard in LearningGuard},
    "kind": {"anonymous", "file", "shared", "pinned", "tool", "step", "boot", "reset", "other"},
    "helper": {"data_workers", "other", "grpo_run"},
    "origin": {origin.value for origin in SampleOrigin},
    "reason": {*(reason.value for reason in EndReason), *map(str, MaskingReason), *THROTTLED},
}
"""The values of labels that are no ranks and no names."""


def test_every_label_value_is_in_its_closed_set(make_slot: Any, make_status: Any) -> None:
    """Other labels are a rank, a bounded number of names, or the version."""
    observation = observation_of(make_status(*(make_slot(rank) for rank in range(4))))
    for metric in RUN_METRICS:
        for values, _ in metric.samples(observation):
            for label, value in zip(metric.labels, values, strict=True):
                if label not in ("rank", "culprit", "function", "group", "version", "tool", "gpu"):
                    assert value in CLOSED[label], metric.name


def test_unreadable_rank_is_exported_only_as_unobservable(
    make_slot: Callable[..., Slot], make_status: Any
) -> None:
    """A rank whose slot is None appears in grpo_rank_observable and in no other metric."""
    observation = observation_of(make_status(make_slot(0), None))
    assert samples("grpo_rank_observable", observation) == {("0",): 1.0, ("1",): 0.0}
    for metric in RUN_METRICS:
        if "rank" in metric.labels and metric.name != "grpo_rank_observable":
            place = metric.labels.index("rank")
            assert {values[place] for values, _ in metric.samples(observation)} == {"0"}, metric.name


class SamplesShell:
    """A run, and what metrics of the catalogue export of it."""

    def __init__(self, make_slot: Callable[..., Slot], make_status: Callable[..., RunStatus]) -> None:
        self.make_slot, self.make_status = make_slot, make_status

    def status(self, *ranks: str, state: str = "running", groups: str = "", **nothing: str) -> None:
        """The run of the fixture, with these ranks; the named parts are not there."""
        slots = [json.loads(text) for text in ranks]
        found = [one if one is None else self.make_slot(rank, **one) for rank, one in enumerate(slots)]
        changes: dict[str, Any] = {"state": state, **dict.fromkeys(nothing)}
        if groups:
            own = {str(number): (20, 10 + number) for number in range(int(groups))}
            changes["collectives"] = {0: own, 1: {"0": (7, 6), "11": (20, 20)}}
        self.run = self.make_status(*found, **changes)

    def recovery(self, **given: str) -> None:
        """A fault."""
        fields = {
            name: text if name in ("cause", "action") else json.loads(text) for name, text in given.items()
        }
        self.run.history.recoveries.append(Recovery(**fields))

    def memory(self, rank: str, has_device: str = "") -> None:
        """A rank has measured no device, or nothing."""
        found = list(self.run.memory)
        one = found[int(rank)]
        found[int(rank)] = replace(one, has_device=False) if has_device and one else None
        self.run = replace(self.run, memory=tuple(found))

    def awaited(self, since: str) -> None:
        """The wait began then."""
        assert self.run.awaited is not None
        self.run = replace(self.run, awaited=replace(self.run.awaited, since_seconds=float(since)))

    def functions(self, count: str) -> None:
        """So many reward functions."""
        names = [f"reward{number:02}" for number in range(int(count))]
        for name in names:
            self.run.history.apply(
                as_event(
                    {
                        "event": "reward_latency",
                        "time": 200.0,
                        "function": name,
                        "calls": 1,
                        "total_seconds": 2.0,
                        "longest_seconds": 2.0,
                    }
                )
            )
        logged = {name: {"mean": 0.25, "std": 0.5} for name in names}
        self.run.history.apply(as_event({"event": "step_logged", "time": 200.0, "reward_functions": logged}))

    def samples(self, *names: str) -> str:
        """Every sample of these metrics that is not 0, and the number of the others."""
        lines = []
        for name in names:
            found = samples(name, observation_of(self.run))
            other = {labels: value for labels, value in found.items() if value != 0 or len(found) == 1}
            lines += [f"{name} {' '.join(labels)} = {value}" for labels, value in other.items()]
            lines += [f"{name} of {len(found) - len(other)} others = 0"] * (len(found) > len(other))
        return "\n".join(lines)


@stories(__file__, "samples.txt")
def test_samples(story: Story, word: str, make_slot: Any, make_status: Any) -> None:
    """Every story of the file."""
    story.check(SamplesShell(make_slot, make_status), word)
