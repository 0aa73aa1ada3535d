"""Metrics follow the naming conventions, and labels have bounded sets of values."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.journal import as_event

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS, EXPORTER_METRICS, LABELS, RUN_METRICS
from grpo_run.dashboards.metrics.metric import (
    CAUSES,
    DECIDED_ACTIONS,
    INCIDENT_CAUSES,
    RUN_STATES,
    Metric,
    RunObservation,
)
from grpo_run.runtime.features import modules
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.rewards import RewardLatency
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Phase, Slot

REPOSITORY = Path(__file__).parents[4]


def observation_of(status: RunStatus) -> RunObservation:
    """An observation of the status at 1000 s of monotonic time."""
    return RunObservation(
        status=status, slots=status.slots, first_rank=0, monotonic_seconds=1000.0, wall_seconds=200.0
    )


def samples(name: str, observation: RunObservation) -> dict[tuple[str, ...], float | None]:
    """The samples of one metric of the catalogue, by label values."""
    (metric,) = [metric for metric in RUN_METRICS if metric.name == name]
    pairs = list(metric.read(observation))
    assert len({labels for labels, _ in pairs}) == len(pairs), "duplicate series"
    return dict(pairs)


def members_used(tree: ast.AST, enum: str) -> Iterator[str]:
    """Names of the members of an enum to which the source refers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum:
            yield node.attr


def sources(*folders: str) -> Iterator[ast.Module]:
    """The syntax trees of all modules in these folders."""
    for folder in folders:
        for path in (REPOSITORY / folder).rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"))


def test_every_cause_of_a_verdict_is_exported_and_no_other() -> None:
    """A cause that no verdict uses has no series."""
    trees = sources("watchdog", "runtime/supervisor/detection", "runtime/supervisor")
    used = {name for tree in trees for name in members_used(tree, "Cause")}
    assert used == {cause.name for cause in INCIDENT_CAUSES}


def test_every_action_that_is_decided_is_exported_and_no_other() -> None:
    """An action that no function of the supervision decides has no series."""
    nodes = (node for tree in sources("runtime/supervisor") for node in ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    used = {name for function in functions for name in members_used(function, "Action")}
    of_features = {action for module in modules("shown") for action in module.ACTIONS}
    assert used | of_features == set(map(str, DECIDED_ACTIONS))


def test_names_are_unique() -> None:
    """Each metric has its own name."""
    assert len(LABELS) == len(ALL_METRICS)


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
    assert "run_id" not in metric.label_names


def test_the_number_of_series_is_bounded() -> None:
    """Eight ranks give fewer than 1095 series without histograms, and each further rank adds at most 101.

    Histograms are never by rank: 13 phases and 4 other durations of 27 series.
    """
    histograms = [metric for metric in ALL_METRICS if metric.kind == "histogram"]
    assert sum(metric.max_series(1000) for metric in histograms) == (13 + 4) * 27
    assert sum(metric.max_series(8) for metric in ALL_METRICS if metric not in histograms) < 1095
    growth = sum(metric.max_series(9) - metric.max_series(8) for metric in ALL_METRICS)
    assert growth == sum(metric.max_series(2) - metric.max_series(1) for metric in ALL_METRICS)
    assert growth <= 101


def test_no_metric_exports_more_series_than_it_declares(make_slot: Any, make_status: Any) -> None:
    """A full observation stays within the declared bound, and every label value is in its closed set."""
    observation = observation_of(make_status(*(make_slot(rank) for rank in range(4))))
    for metric in RUN_METRICS:
        pairs = list(metric.read(observation))
        assert 0 < len(pairs) <= metric.max_series(4), metric.name
        for values, _ in pairs:
            assert len(values) == len(metric.labels), metric.name
            for label, value in zip(metric.labels, values, strict=True):
                assert label.values is None or value in label.values, metric.name


def test_the_default_group_has_a_name_and_the_others_are_bounded(make_slot: Any, make_status: Any) -> None:
    """A group that only one rank has read has no gap; further groups are counted together."""
    own = {str(number): (20, 10 + number) for number in range(12)}
    ranks = {0: own, 1: {"0": (7, 6), "11": (20, 20)}}
    status = make_status(make_slot(0), make_slot(1), collectives=ranks)
    found = samples("grpo_collectives_completed", observation_of(status))
    names = {group for rank, group in found if rank == "0"}
    assert names == {"default", *map(str, range(1, 8)), "other"}
    assert found["0", "default"] == 10
    assert found["0", "other"] == 18 + 19 + 20 + 21
    assert samples("grpo_collectives_enqueued", observation_of(status))["1", "default"] == 7
    gaps = samples("grpo_collective_straggler_gap", observation_of(status))
    assert gaps == {("default",): 4, ("other",): 1}


def test_a_script_with_many_reward_functions_adds_no_series_without_limit(make_status: Any) -> None:
    """Further functions are counted together."""
    status = make_status()
    for number in range(20):
        status.history.rewards.latencies[0, 0, f"reward{number:02}"] = RewardLatency(
            calls=1, total_seconds=2.0
        )
    found = samples("grpo_reward_seconds_total", observation_of(status))
    assert len(found) == 9
    assert found[("other",)] == 24.0
    assert found[("reward00",)] == 2.0
    functions = {f"reward{number:02}": {"mean": 0.25, "std": 0.5} for number in range(20)}
    status.history.apply(as_event({"event": "step_logged", "time": 200.0, "reward_functions": functions}))
    assert len(samples("grpo_reward_function_mean", observation_of(status))) == 9
    assert samples("grpo_reward_function_std", observation_of(status))[("reward00",)] == 0.5


def test_values_outside_the_closed_sets_become_unknown(make_status: Any) -> None:
    """A journal written by another version adds no label values."""
    status = make_status(state="hibernating")
    status.history.recoveries.append(Recovery(cause="solar_flare", rank=None, step=1, action="reboot"))
    observation = observation_of(status)
    assert {key for key, value in samples("grpo_run_state", observation).items() if value} == {("unknown",)}
    assert samples("grpo_incidents_total", observation)[("unknown",)] == 1.0
    assert samples("grpo_last_incident_info", observation) == {("unknown", "undecided", "none"): 1.0}


def test_run_state_is_one_hot_over_all_states(make_status: Any) -> None:
    """Every state is exported, and exactly one of them is 1."""
    states = samples("grpo_run_state", observation_of(make_status(state="recovering")))
    assert states == {(state,): float(state == "recovering") for state in RUN_STATES}


def test_a_stop_is_an_incident_but_no_restart(make_status: Any) -> None:
    """A fault that ended the run counts as an incident only."""
    status = make_status()
    status.history.recoveries.append(Recovery(cause="exception", rank=0, step=7, action="stop"))
    observation = observation_of(status)
    assert sum(value or 0 for value in samples("grpo_restarts_total", observation).values()) == 1.0
    assert samples("grpo_restarts_total", observation)[("signal", "restart")] == 1.0
    incidents = samples("grpo_incidents_total", observation)
    assert (incidents[("exception",)], incidents[("signal",)], len(incidents)) == (1.0, 1.0, len(CAUSES))


def test_memory_is_exported_by_rank_and_phase(make_slot: Any, make_status: Any) -> None:
    """Only of ranks that have measured it, and device figures only of ranks with a device."""
    status = make_status(make_slot(0), make_slot(1), make_slot(2), None)
    without = replace(status.memory[1], has_device=False)
    observation = observation_of(replace(status, memory=(status.memory[0], without, None, status.memory[0])))
    gib = 2**30
    peaks = samples("grpo_rank_gpu_memory_peak_bytes", observation)
    assert peaks[("0", "forward_backward")] == 70 * gib
    assert peaks[("0", "generate")] == 60 * gib
    assert {rank for rank, _ in peaks} == {"0"}
    assert samples("grpo_rank_gpu_alloc_retries_total", observation) == {("0",): 13}
    assert samples("grpo_rank_gpu_ooms_total", observation) == {("0",): 2}
    assert samples("grpo_rank_gpu_memory_reserved_bytes", observation) == {("0",): 75 * gib}
    resident = samples("grpo_rank_resident_peak_bytes", observation)
    assert (resident["0", "optimizer"], resident["1", "optimizer"]) == (3 * gib, 4 * gib)
    assert samples("grpo_rank_memory_accounting_seconds_total", observation) == {("0",): 0.5, ("1",): 0.5}


def test_detection_and_recovery_times_are_the_last_known_values(make_status: Any) -> None:
    """A fault that is not recovered yet does not hide the previous recovery time."""
    status = make_status()
    status.history.recoveries.append(
        Recovery(cause="signal", rank=0, step=8, action="", detection_seconds=0.75)
    )
    observation = observation_of(status)
    assert samples("grpo_last_detection_seconds", observation) == {(): 0.75}
    assert samples("grpo_last_recovery_seconds", observation) == {(): 2.5}
    assert samples("grpo_lost_steps_total", observation) == {(): 1.0}


def test_the_innermost_phase_is_exported(make_slot: Any, make_status: Any) -> None:
    """A rank in `generate` inside `data` is exported as generating for 10 s."""
    observation = observation_of(make_status(make_slot(0)))
    phases = samples("grpo_rank_phase", observation)
    assert phases == {("0", phase.name): float(phase is Phase.generate) for phase in Phase}
    assert samples("grpo_rank_phase_age_seconds", observation) == {("0",): 10.0}


def test_a_rank_outside_any_phase_is_in_none(make_slot: Any, make_status: Any) -> None:
    """Without an open phase every phase is 0 and the age is absent."""
    observation = observation_of(make_status(make_slot(0, phases=())))
    assert set(samples("grpo_rank_phase", observation).values()) == {0.0}
    assert samples("grpo_rank_phase_age_seconds", observation) == {}


def test_unreadable_rank_is_exported_only_as_unobservable(
    make_slot: Callable[..., Slot], make_status: Any
) -> None:
    """A rank whose slot is None appears in grpo_rank_observable and in no other metric."""
    observation = observation_of(make_status(make_slot(0), None))
    assert samples("grpo_rank_observable", observation) == {("0",): 1.0, ("1",): 0.0}
    for metric in RUN_METRICS:
        if "rank" in metric.label_names and metric.name != "grpo_rank_observable":
            place = metric.label_names.index("rank")
            assert {values[place] for values, _ in metric.read(observation)} == {"0"}, metric.name


def test_a_wait_is_exported_with_its_rank_phase_and_deadline(make_slot: Any, make_status: Any) -> None:
    """However short; nothing is exported while nobody waits, or while a fault is handled."""
    awaited = ("grpo_run_awaited_rank_seconds", "grpo_run_awaited_rank_deadline_seconds")
    waiting = observation_of(make_status(make_slot(0), make_slot(1)))
    assert [samples(name, waiting) for name in awaited] == [
        {("0", "generate"): 4.0},
        {("0", "generate"): 60.0},
    ]
    for changes in ({"awaited": None}, {"state": "recovering"}):
        observation = observation_of(make_status(make_slot(0), **changes))
        assert [samples(name, observation) for name in awaited] == [{}, {}]


@pytest.mark.parametrize(
    ("since", "state", "eta"),
    [(996.0, "running", 186.0), (990.0, "running", None), (996.0, "stopping", None)],
)
def test_the_time_left_is_exported_while_steps_are_committed(
    make_slot: Any, make_status: Any, since: float, state: str, eta: float | None
) -> None:
    """93 steps of 2 s. A wait of 10 s is five times as long as a step."""
    status = make_status(make_slot(0), state=state)
    assert status.awaited is not None
    status = replace(status, awaited=replace(status.awaited, since_seconds=since))
    assert samples("grpo_step_seconds", observation_of(status)) == {(): 2.0}
    assert samples("grpo_eta_seconds", observation_of(status)) == {(): eta}


def test_progress_age_is_never_negative(make_slot: Any, make_status: Any) -> None:
    """A slot written after the clock was read has an age of 0 s."""
    observation = observation_of(make_status(make_slot(0, last_progress_seconds=1000.5)))
    assert samples("grpo_rank_last_progress_age_seconds", observation) == {("0",): 0.0}


def test_run_and_exporter_metrics_do_not_mix() -> None:
    """Only the exporter's own metrics are exported after a failed read."""
    assert {metric.name for metric in EXPORTER_METRICS} == {
        "grpo_observation_failed",
        "grpo_observation_failures_total",
        "grpo_observation_timestamp_seconds",
    }


def test_host_memory_is_exported_by_limit_process_and_kind(make_slot: Any, make_status: Any) -> None:
    """Of the nearest limit; a rank that cannot be read and a sample that does not exist export nothing."""
    status = make_status(make_slot(0), None)
    observation = observation_of(status)
    assert samples("grpo_host_memory_working_set_bytes", observation) == {(): 800}
    assert samples("grpo_host_memory_full_pressure_ratio", observation) == {(): 0.25}
    ranks = samples("grpo_rank_host_memory_bytes", observation)
    assert ranks == {
        ("0", "anonymous"): 40, ("0", "file"): 30, ("0", "shared"): 20, ("0", "pinned"): 10,
    }  # fmt: skip
    assert samples("grpo_helper_memory_bytes", observation) == {
        ("data_workers",): 1,
        ("other",): 2,
        ("grpo_run",): 3,
    }
    nothing = observation_of(replace(status, host_memory=None))
    assert samples("grpo_host_memory_limit_bytes", nothing) == {(): None}
    assert samples("grpo_rank_host_memory_bytes", nothing) == {}
    assert samples("grpo_host_memory_short_total", nothing) == {(): 0.0}
