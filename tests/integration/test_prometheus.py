"""A real Prometheus loads the alert rules, scrapes a real metrics server and answers every dashboard
query.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support import runs
from support.exported_run import ExportedRun
from support.prometheus import DEADLINE_SECONDS, eventually, promtool, query, tool, values
from support.provisioned import PAGES, RULES, dashboard, queries_of, rules_file

from grpo_run.dashboards.metrics.server import MetricsServer, start
from grpo_run.runtime.registry import targets_folder
from grpo_run.watchdog.observation import Phase


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the module's runs and of its Prometheus."""
    return tmp_path_factory.mktemp("prometheus")


def served(
    folder: Path, run_id: str, *, eventful: bool = False
) -> Iterator[tuple[ExportedRun, MetricsServer]]:
    """Create a run directory, lock it as its supervisor does, and serve its metrics."""
    run = ExportedRun(folder, run_id, eventful=eventful)
    server = start(run.read, "127.0.0.1:0")
    yield run, server
    assert server.stop(DEADLINE_SECONDS)
    run.close()


@pytest.fixture(scope="module")
def night(folder: Path) -> Iterator[tuple[ExportedRun, MetricsServer]]:
    """The run that stays readable."""
    yield from served(folder, "night")


@pytest.fixture(scope="module")
def storm(folder: Path) -> Iterator[tuple[ExportedRun, MetricsServer]]:
    """The run in which everything happens that is counted."""
    yield from served(folder, "storm", eventful=True)


@pytest.fixture(scope="module")
def doomed(folder: Path) -> Iterator[tuple[ExportedRun, MetricsServer]]:
    """Serve a run that one test makes unreadable."""
    yield from served(folder, "doomed")


@pytest.fixture(scope="module")
def prometheus(
    folder: Path,
    night: tuple[ExportedRun, MetricsServer],
    storm: tuple[ExportedRun, MetricsServer],
    doomed: tuple[ExportedRun, MetricsServer],
) -> Iterator[httpx.Client]:
    """A client of a Prometheus that has loaded the alert rules and scrapes the servers four times a second.

    Shared by the module, because Prometheus waits five seconds before its first scrape.
    """
    targets = ["{}:{}".format(*server.address) for _, server in (night, storm, doomed)]
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump({
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(rules_file(folder))],
            "scrape_configs": [
                {"job_name": "grpo-run", "static_configs": [{"targets": targets}]},
                {
                    "job_name": "launched",
                    "honor_labels": True,
                    "file_sd_configs": [{"files": [f"{targets_folder()}/*.json"], "refresh_interval": "1s"}],
                },
            ],
        })
    )  # fmt: skip
    promtool("check", "config", str(config))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"GOMAXPROCS": "1"},
        )
    try:
        listening = eventually(
            lambda: re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', log.read_text()),
            "address in the log of prometheus",
        )
        with httpx.Client(
            base_url=f"http://{listening[1]}", timeout=DEADLINE_SECONDS, trust_env=False
        ) as client:
            eventually(lambda: client.get("/-/ready").status_code == 200, "ready prometheus")
            yield client
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(DEADLINE_SECONDS)


def for_the_run(expression: str, run_id: str = "night") -> str:
    """Return a dashboard query as Grafana sends it for a run."""
    return expression.replace("$run", run_id).replace("$__rate_interval", "1m")


def test_prometheus_has_the_values_of_board_and_journal(prometheus: httpx.Client) -> None:
    """Values and labels arrive unchanged from board and journal through server and scrape to a query."""
    eventually(lambda: query(prometheus, 'grpo_step{run_id="night"}'), "first scrape")

    def night(selector: str, label: str = "run_id") -> dict[str, float]:
        name, brace, matchers = selector.partition("{")
        return values(prometheus, f'{name}{{run_id="night"{"," if brace else "}"}{matchers}', label)

    assert night("grpo_step") == {"night": 8}
    assert night("grpo_target_steps") == {"night": 50}
    assert night('grpo_run_state{state=~".+"} == 1', "state") == {"running": 1}
    assert night("grpo_attempts_total") == {"night": 2}
    assert night('grpo_restarts_total{action="restart"} > 0', "cause") == {"signal": 1}
    assert night("grpo_last_incident_info", "culprit") == {"1": 1}
    assert night("grpo_lost_steps_total") == {"night": 1}
    assert night("grpo_checkpoint_step") == {"night": 6}
    assert night("grpo_reward") == {"night": 1}
    assert night("grpo_rank_observable", "rank") == {"0": 1, "1": 0}
    assert night('grpo_rank_phase{rank=~".+"} == 1', "phase") == {"generate": 1}
    assert night("grpo_rank_vote_wait_seconds_total", "rank") == {"0": 1.25}
    assert night("grpo_rank_loss", "rank") == {"0": 0.5}
    assert night("grpo_rank_gpu_memory_peak_bytes", "phase") == {"generate": 60 * 2**30}
    assert night("grpo_rank_gpu_alloc_retries_total", "rank") == {"0": 3}
    assert night("grpo_run_awaited_rank_deadline_seconds", "phase") == {"generate": pytest.approx(600)}
    assert 0 <= night("grpo_run_awaited_rank_seconds", "rank")["0"] < 60
    assert night("grpo_rank_grad_norm", "rank") == {}
    age = values(prometheus, 'time() - grpo_observation_timestamp_seconds{run_id="night"}', "run_id")
    assert 0 <= age["night"] < 60


def test_prometheus_answers_every_query_of_the_dashboard(
    prometheus: httpx.Client, storm: tuple[ExportedRun, MetricsServer]
) -> None:
    """Every query has values for a run that has them, and the timeline distinguishes the unobservable rank
    from the working one.

    No run has all of them at once: while a rank is waited for, no time is left.
    """
    eventually(lambda: query(prometheus, 'rate(grpo_rank_votes_total{run_id="night"}[1m])'), "second scrape")
    queries = [one for page in PAGES for found in queries_of(dashboard(page)).values() for one in found]
    silent: list[str] = []

    def all_answered() -> bool:
        storm[0].count_on()
        silent[:] = [
            expression
            for expression in queries
            if not any(query(prometheus, for_the_run(expression, run_id)) for run_id in ("storm", "night"))
        ]
        return not silent

    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all_answered() and time.monotonic() < deadline:  # a scrape that takes too long leaves a gap
        time.sleep(0.3)
    assert silent == []
    (timeline,) = [expression for expression in queries if "grpo_rank_phase{" in expression]
    assert values(prometheus, for_the_run(timeline), "rank") == {"0": Phase.generate, "1": -1}


def test_prometheus_evaluates_the_alerts_and_finds_the_lost_rank(prometheus: httpx.Client) -> None:
    """All rules evaluate without error, and GrpoRunRankLost is pending for rank 1 only."""

    def lost_ranks() -> set[str]:
        alerts = prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
        return {
            alert["labels"]["rank"]
            for alert in alerts
            if (alert["labels"]["alertname"], alert["labels"]["run_id"]) == ("GrpoRunRankLost", "night")
        }

    assert eventually(lost_ranks, "pending GrpoRunRankLost") == {"1"}
    (group,) = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(RULES)


def test_a_run_that_becomes_unreadable_leaves_no_old_values(
    prometheus: httpx.Client, doomed: tuple[ExportedRun, MetricsServer]
) -> None:
    """After a failed read the old values are stale immediately, and the failure is exported."""
    eventually(lambda: query(prometheus, 'grpo_step{run_id="doomed"}'), "first scrape")
    doomed[0].broken = True
    eventually(
        lambda: query(prometheus, 'grpo_observation_failed{run_id="doomed"} == 1'), "failed observation"
    )
    left = query(prometheus, 'group by (__name__) ({run_id="doomed",__name__=~"grpo_.+"})')
    assert {item["metric"]["__name__"] for item in left} == {
        "grpo_observation_failed",
        "grpo_observation_failures_total",
        "grpo_observation_timestamp_seconds",
    }


def test_alerts_tell_a_run_that_finished_from_one_that_failed(
    tmp_path: Path, prometheus: httpx.Client
) -> None:
    """A real Prometheus finds and scrapes both runs; neither is said to have vanished."""
    (tmp_path / "script.py").write_text(
        "import os, sys, time\n\n"
        "while not os.path.exists('end'):\n    time.sleep(0.1)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    launched = [
        runs.Run(
            tmp_path,
            ["--nproc-per-node", "1", "--on-end", f"cat > {name}.json", "script.py", code],
            name=name,
            metrics="127.0.0.1:0",
        ).start()
        for name, code in (("good", "0"), ("bad", "3"))
    ]  # fmt: skip
    ended = {"good": "finished", "bad": "failed"}
    try:
        ids = {name: run.until_event("run_started")["run"] for name, run in zip(ended, launched, strict=True)}
        # by name: another run's port may be one of theirs, at an address that is still scraped
        seen = f'count_over_time(grpo_supervisor_up{{job="launched",run_id=~"{"|".join(ids.values())}"}}[1m])'
        eventually(lambda: len(query(prometheus, f"{seen} > 1")) == 2, "two scrapes of both runs")
        (tmp_path / "end").touch()
        assert [run.wait() for run in launched] == [0, 93]
        records = [json.loads((tmp_path / f"{name}.json").read_bytes()) for name in ended]
        assert [record["state"] for record in records] == list(ended.values())
        assert [record["exit_code"] for record in records] == [0, 93]
        assert records[0]["verdict"] is None
        assert records[1]["verdict"]["sentence"] in records[1]["sentence"]
        # both of the last scrapes have the last state
        for name, state in ended.items():
            seen = f'count_over_time((grpo_run_state{{run_id="{ids[name]}",state="{state}"}} == 1)[1m:250ms])'
            assert float(query(prometheus, seen)[0]["value"][1]) >= 1

        def firing() -> dict[str, str]:
            alerts = prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
            return {
                alert["labels"]["run_id"]: alert["labels"]["alertname"]
                for alert in alerts
                if alert["labels"]["run_id"] in ids.values()
            }

        wanted = {ids["good"]: "GrpoRunFinished", ids["bad"]: "GrpoRunFailed"}
        eventually(lambda: firing() == wanted, "one alert for each run")
        # the address of a run that has ended is not scraped in vain
        eventually(lambda: not query(prometheus, f'up{{run_id=~"{"|".join(ids.values())}"}}'), "no target")
    finally:
        for run in launched:
            run.close()
