"""A real Prometheus loads the alert rules, scrapes a real metrics server and answers every dashboard query.

Requires `prometheus` and `promtool` on PATH (package `prometheus` on Debian and Ubuntu).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support import runs
from support.trainer_and_loop import TRAINER, loop_in_full

from grpo_run.dashboards.metrics.server import MetricsServer, start
from grpo_run.dashboards.provisioning.generate import FOLDER
from grpo_run.dashboards.provisioning.grafana import dashboard, queries_of
from grpo_run.runtime.board.accounting.memory_area import MemoryAreaWriter
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.continuity.rewards import FailureKind
from grpo_run.runtime.host_memory.last_sample import LastSample
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import RunStatus, read_status
from grpo_run.runtime.rollouts.exclusions import Reason
from grpo_run.watchdog.host_memory.sample import HostSample, LimitUse, ProcessMemory
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.awaited import AwaitedRank

DEADLINE_SECONDS = 60.0
RULES = FOLDER / "prometheus" / "alerts.yml"


def tool(name: str) -> str:
    """Return the path of a Prometheus binary.

    Fail if it is missing, because no other test checks the rules.
    """
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"{name} is not on PATH; install it with"
            " `apt-get install -y --no-install-recommends prometheus` and disable the service that it starts"
        )
    return path


def promtool(*arguments: str) -> str:
    """Run promtool and return its output; fail with its output if it fails."""
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def eventually(check: Callable[[], Any], what: str) -> Any:
    """Repeat a check until its result is true; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        result = check()
        if result:
            return result
        time.sleep(0.1)
    return pytest.fail(f"no {what} within {DEADLINE_SECONDS} s")


def fill_memory(area: MemoryAreaWriter) -> None:
    """Publish memory of a rank with a GPU of 80 GiB whose rollouts are split; every figure has a value."""
    totals, own = area.totals, area.figures(Phase.generate)
    for name in totals.__slots__:
        setattr(totals, name, 2**30)
    totals.has_device, totals.capacity_bytes, totals.retries, totals.ooms = 1, 80 * 2**30, 3, 1
    own.peak_allocated_bytes, own.peak_resident_bytes = 60 * 2**30, 9 * 2**30
    foreseen = area.forecast
    foreseen.predicted_bytes, foreseen.observed_bytes, foreseen.limit_bytes = (
        70 * 2**30,
        66 * 2**30,
        78 * 2**30,
    )
    foreseen.pieces, foreseen.rollouts, foreseen.split_rollouts = 2, 9, 4
    area.publish(Phase.generate)


HOST_SAMPLE = HostSample(
    at=time.time(),
    limits=(
        LimitUse(
            name="the machine", limit_bytes=64 << 30, usage_bytes=40 << 30, working_set_bytes=30 << 30, shared_bytes=1 << 30
        ),
    ),
    ranks={0: ProcessMemory(anonymous_bytes=5 << 30, file_bytes=1 << 30, shared_bytes=1 << 20, pinned_bytes=0, pss_bytes=5 << 30)},
    data_workers_bytes=1 << 30,
    other_helpers_bytes=1 << 20,
    supervisor_bytes=1 << 28,
    staging_bytes=1 << 30,
    shm_used_bytes=1 << 30,
    shm_total_bytes=32 << 30,
    full_pressure=0.01,
    kills=0,
)  # fmt: skip
"""Host memory of a machine of 64 GiB; every figure has a value."""


class Run:
    """A run directory as a supervisor with two ranks writes it in the middle of a run.

    Rank 0 is generating at step 8; rank 1 was restarted and has not written to the board yet, and is waited for.

    Args:
        folder: of the runs.
        run_id: of this one.
        eventful: nobody is waited for, rank 0 reports all that it can, and everything that is counted can be counted on.
    """

    def __init__(self, folder: Path, run_id: str, *, eventful: bool = False) -> None:
        self.directory = RunDirectory(path=folder / run_id)
        self.directory.create()
        self.directory.write_run({"run_id": run_id})
        self.broken = False
        self._lock = self.directory.acquire()
        self._journal = Journal(self.directory.journal, run_id)
        self.board = Board.create(self.directory.board, 2)
        self._write_history()
        self.board.begin_attempt(1)
        self._eventful = eventful
        slot = self._slot = self.board.writer(0, rank=0, pid=os.getpid(), attempt=1)
        slot.state = RankState.training
        slot.train_call, slot.target_steps, slot.voted_step, slot.votes = 1, 50, 8, 3
        slot.tokens_generated, slot.vote_wait_seconds, slot.loss = 4096, 1.25, 0.5
        if eventful:
            slot.grad_norm, slot.learning_rate, slot.completion_length = 0.75, 1e-5, 200.0
            self._write_rare_events()
        slot.replace(Phase.data)
        slot.enter(Phase.generate)
        slot.publish()
        fill_memory(slot.memory_area)
        LastSample(self.directory.host_memory).write(HOST_SAMPLE)
        now = time.monotonic()
        if not eventful:
            self.board.write_awaited(
                AwaitedRank(
                    rank=0, phase=Phase.generate, since_seconds=now, deadline_at_seconds=now + 600.0, busy=None, waiters=(1,)
                )
            )  # fmt: skip

    def _write_history(self) -> None:
        write = self._journal.write
        write("run_started")
        self._journal.attempt = 0
        write("attempt_started")
        write("train_started", rank=0, step=0, train_call=1, target_steps=50)
        for step in range(1, 8):
            write("step_committed", step=step, train_call=1)
            write("step_logged", rank=0, step=step, reward=step / 8)
        write("checkpoint_published", step=6, train_call=1, path="out/checkpoint-6", verified=True)
        write("incident", step=7, cause="signal", culprit=1, detection_seconds=0.25, signature="9")
        write("action", action="restart")
        self._journal.attempt = 1
        write("attempt_started")
        write("train_started", rank=0, step=6, train_call=1, target_steps=50)
        for step in (7, 8):
            write("step_committed", step=step, train_call=1)
            write("step_logged", rank=0, step=step, reward=step / 8)
        write("state_changed", to="running")

    def _write_rare_events(self) -> None:
        write = self._journal.write
        write("checkpoint_staged", step=8, train_call=1)
        write("memory_short", step=8)
        write("memory_restart", step=8, train_call=1)

    def count_on(self) -> None:
        """Let everything happen once more that is counted while a run goes on."""
        write = self._journal.write
        write("sample_excluded", rank=0, step=8, reason=Reason.failed.value, count=1)
        write("reward_failed", rank=0, step=8, kind=FailureKind.exception.value, reward="length")
        write("reward_worker_replaced", rank=0, step=8)
        write("incident", step=8, cause="signal", culprit=1, detection_seconds=0.25, signature="9")
        write("state_changed", to="running")
        self._slot.ended_eos += 1
        self._slot.publish()

    def read(self) -> RunStatus:
        """Read the status of the directory, like a reader outside the supervisor."""
        if self.broken:
            raise OSError("the run directory cannot be read")
        return read_status(self.directory)

    def close(self) -> None:
        """Close the journal and release the lock."""
        self._journal.close()
        os.close(self._lock)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the module's runs and of its Prometheus."""
    return tmp_path_factory.mktemp("prometheus")


def served(folder: Path, run_id: str, *, eventful: bool = False) -> Iterator[tuple[Run, MetricsServer]]:
    """Create a run directory, lock it as its supervisor does, and serve its metrics."""
    run = Run(folder, run_id, eventful=eventful)
    server = start(run.read, "127.0.0.1:0")
    yield run, server
    assert server.stop(DEADLINE_SECONDS)
    run.close()


@pytest.fixture(scope="module")
def night(folder: Path) -> Iterator[tuple[Run, MetricsServer]]:
    """The run that stays readable."""
    yield from served(folder, "night")


@pytest.fixture(scope="module")
def storm(folder: Path) -> Iterator[tuple[Run, MetricsServer]]:
    """The run in which everything happens that is counted."""
    yield from served(folder, "storm", eventful=True)


@pytest.fixture(scope="module")
def doomed(folder: Path) -> Iterator[tuple[Run, MetricsServer]]:
    """Serve a run that one test makes unreadable."""
    yield from served(folder, "doomed")


@pytest.fixture(scope="module")
def prometheus(
    folder: Path,
    night: tuple[Run, MetricsServer],
    storm: tuple[Run, MetricsServer],
    doomed: tuple[Run, MetricsServer],
) -> Iterator[httpx.Client]:
    """A client of a Prometheus that has loaded the alert rules and scrapes the servers four times a second.

    Shared by the module, because Prometheus waits five seconds before its first scrape.
    """
    targets = ["{}:{}".format(*server.address) for _, server in (night, storm, doomed)]
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump({
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": "grpo-run", "static_configs": [{"targets": targets}]},
                {
                    "job_name": "launched",
                    "file_sd_configs": [{"files": [str(folder / "launched.json")], "refresh_interval": "1s"}],
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


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the instant vector of a query; fail with the error message of Prometheus."""
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    result = answer["data"]["result"]
    assert isinstance(result, list)
    return result


def values(client: httpx.Client, expression: str, label: str) -> dict[str, float]:
    """Return the values of a query by one of its labels."""
    return {item["metric"].get(label, ""): float(item["value"][1]) for item in query(client, expression)}


def for_the_run(expression: str, run_id: str = "night") -> str:
    """Return a dashboard query as Grafana sends it for a run."""
    return expression.replace("$run_id", run_id).replace("$__rate_interval", "1m")


def test_promtool_accepts_the_rules() -> None:
    """promtool accepts the committed rules."""
    assert "11 rules found" in promtool("check", "rules", str(RULES))


def test_every_alert_passes_its_unit_tests() -> None:
    """The tests in alerts_test.yml pass."""
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name("alerts_test.yml")))


def test_the_alerts_unit_tests_detect_rules_that_never_fire(tmp_path: Path) -> None:
    """A rule that no longer fires fails its tests."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    shutil.copy(RULES.with_name("alerts_test.yml"), tmp_path)
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(tmp_path / "alerts_test.yml")],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    for rule in rules["groups"][0]["rules"]:
        assert f"alertname: {rule['alert']}" in done.stdout + done.stderr


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
    prometheus: httpx.Client, storm: tuple[Run, MetricsServer]
) -> None:
    """Every query has values for a run that has them, and the timeline distinguishes the unobservable rank from the working one.

    No run has all of them at once: while a rank is waited for, no time is left.
    """
    eventually(lambda: query(prometheus, 'rate(grpo_rank_votes_total{run_id="night"}[1m])'), "second scrape")
    queries = queries_of(dashboard())
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
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * 11


def test_a_run_that_becomes_unreadable_leaves_no_old_values(
    prometheus: httpx.Client, doomed: tuple[Run, MetricsServer]
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


@loop_in_full
def test_a_live_run_exports_its_ranks(script: str, tmp_path: Path) -> None:
    """/metrics of a live launch has state, step, reward, and each rank's phase, progress, tokens and votes."""
    run = runs.Run(
        tmp_path,
        [
            "--nproc-per-node", "2", str(runs.SCRIPTS / script), "--output-dir", "out", "--max-steps", "60",
            "--save-steps", "20", "--step-seconds", "0.1",
        ],
        metrics="127.0.0.1:0",
    ).start()  # fmt: skip
    try:
        run.until(lambda events: any(event["event"] == "step_logged" for event in events))
        run.until_step(12)
        address = re.search(r"http://[\d.]+:\d+/metrics", run.printed())
        assert address is not None, run.tail()
        with urllib.request.urlopen(address[0], timeout=10) as answer:
            text = answer.read().decode()
        samples = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line[0] != "#"
        }

        def total(name: str, *labels: str) -> float:
            return sum(
                v
                for k, v in samples.items()
                if k.partition("{")[0] == name and all(label in k for label in labels)
            )

        assert total("grpo_run_state", 'state="running"') == 1
        assert total("grpo_step") >= 10
        assert total("grpo_rank_observable") == 2
        for rank in (0, 1):
            assert total("grpo_rank_phase", f'rank="{rank}"') == 1
            assert total("grpo_rank_votes_total", f'rank="{rank}"') > 5
            assert 0 <= total("grpo_rank_last_progress_age_seconds", f'rank="{rank}"') < 30
            if script == TRAINER:
                assert total("grpo_rank_tokens_generated_total", f'rank="{rank}"') > 0
            else:
                assert total("grpo_rank_loss", f'rank="{rank}"') != 0
                assert total("grpo_rank_learning_rate", f'rank="{rank}"') > 0
        assert "grpo_reward{" in text
        assert total("grpo_step_seconds") > 0.05
    finally:
        run.close()


@pytest.mark.parametrize(("code", "exit_code", "state"), [(0, 0, "finished"), (3, 93, "failed")])
def test_a_regular_scraper_learns_how_a_run_ended(
    tmp_path: Path, code: int, exit_code: int, state: str
) -> None:
    """The exporter answers one more scrape after the end, so that an alert can tell 93 from 0."""
    (tmp_path / "script.py").write_text(f"import sys, time\n\ntime.sleep(1.5)\nsys.exit({code})\n")
    run = runs.Run(tmp_path, ["--nproc-per-node", "1", "script.py"], metrics="127.0.0.1:0").start()
    try:
        address = eventually(lambda: re.search(r"http://[\d.]+:\d+/metrics", run.printed()), "address")[0]
        states: list[str] = []
        assert run.process is not None
        while run.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=10) as answer:
                states += re.findall(
                    r'grpo_run_state{run_id="[^"]+",state="(\w+)"} 1.0', answer.read().decode()
                )
            time.sleep(0.3)
        assert run.wait() == exit_code
        assert states[-1] == state
    finally:
        run.close()


def test_alerts_tell_a_run_that_finished_from_one_that_failed(
    tmp_path: Path, folder: Path, prometheus: httpx.Client
) -> None:
    """A real Prometheus scrapes both runs; neither is said to have vanished."""
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
    ]
    try:
        addresses = [
            eventually(lambda run=run: re.search(r"http://([\d.]+:\d+)/metrics", run.printed()), "address")[1]
            for run in launched
        ]
        written = folder / "launched.new"
        written.write_text(json.dumps([{"targets": addresses}]))
        written.replace(folder / "launched.json")
        eventually(
            lambda: (
                len(query(prometheus, 'count_over_time(grpo_supervisor_up{job="launched"}[1m]) > 1')) == 2
            ),
            "two scrapes of both runs",
        )
        (tmp_path / "end").touch()
        assert [run.wait() for run in launched] == [0, 93]
        ended = {"good": "finished", "bad": "failed"}
        ids = {name: run.status()["run_id"] for name, run in zip(ended, launched, strict=True)}
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
    finally:
        for run in launched:
            run.close()
