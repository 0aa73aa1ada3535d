"""A real Prometheus and a real Alertmanager send each planted fault once, and a good run only its end."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from support import runs
from support.prometheus import DEADLINE_SECONDS, eventually, query, tool

from grpo_run.cli import dashboards

COLLAPSE = str(runs.SCRIPTS / "collapse.py")
STEPS = (
    "--nproc-per-node",
    "2",
    "--snapshot-every",
    "1",
    COLLAPSE,
    "--max-steps",
    "14",
    "--save-steps",
    "50",
)


class Inbox(ThreadingHTTPServer):
    """Receives the webhooks of Alertmanager."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Webhook)
        self.received: list[dict[str, str]] = []
        """The labels of each alert that fires, as often as it was sent."""

    def of(self, run_id: str) -> Counter[str]:
        """How often each alert of a run was sent, without its prefix."""
        return Counter(
            labels["alertname"].removeprefix("GrpoRun")
            for labels in self.received
            if labels["run_id"] == run_id
        )


class Webhook(BaseHTTPRequestHandler):
    """One request of Alertmanager."""

    server: Inbox

    def do_POST(self) -> None:
        """Note the alerts that fire."""
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received += [alert["labels"] for alert in sent["alerts"] if alert["status"] == "firing"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def started(log: Path, *command: str) -> Iterator[str]:
    """Run a server; yields the address that it listens on, as its log says."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        found = eventually(
            lambda: re.search(r'msg="?Listening on"? address=(127\.0\.0\.1:\d+)', log.read_text()),
            f"address in {log}",
        )
        yield found[1]
    finally:
        process.terminate()
        process.wait(DEADLINE_SECONDS)


@pytest.fixture
def inbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Inbox, httpx.Client, Path]]:
    """What Alertmanager sends, a client of Prometheus, and the file of its targets.

    Both run with the exported configuration; the parameter is the interval of scrapes in seconds.
    """
    seconds = request.param
    assert dashboards.main(["export", str(tmp_path / "stack")]) == 0
    received = Inbox()
    threading.Thread(target=received.serve_forever, daemon=True).start()
    manager = yaml.safe_load((tmp_path / "stack/alertmanager/alertmanager.yml").read_text())
    url = f"http://127.0.0.1:{received.server_address[1]}/"
    manager["receivers"].append({"name": "test", "webhook_configs": [{"url": url}]})
    manager["route"] |= {"receiver": "test", "group_wait": "1s"}
    manager["route"]["routes"] = []
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(manager))
    prometheus = yaml.safe_load((tmp_path / "stack/prometheus/prometheus.yml").read_text())
    prometheus["global"] = {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"}
    prometheus["rule_files"] = [str(tmp_path / "stack/prometheus/alerts.yml")]
    targets = tmp_path / "targets" / "run.json"
    targets.parent.mkdir()
    (sd,) = prometheus["scrape_configs"][0]["file_sd_configs"]
    sd |= {"files": [str(targets)], "refresh_interval": "1s"}
    with ExitStack() as stack:
        stack.callback(received.shutdown)
        address = stack.enter_context(
            started(
                tmp_path / "alertmanager.log",
                tool("prometheus-alertmanager"),
                f"--config.file={tmp_path / 'alertmanager.yml'}",
                f"--storage.path={tmp_path / 'am'}",
                "--web.listen-address=127.0.0.1:0",
                "--cluster.listen-address=",
            )
        )
        prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [address]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(prometheus))
        listening = stack.enter_context(
            started(
                tmp_path / "prometheus.log",
                tool("prometheus"),
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                "--web.listen-address=127.0.0.1:0",
            )
        )
        client = stack.enter_context(
            httpx.Client(base_url=f"http://{listening}", timeout=DEADLINE_SECONDS, trust_env=False)
        )
        yield received, client, targets


@pytest.mark.parametrize(
    "inbox", [pytest.param(1, id="1s"), pytest.param(15, id="15s", marks=pytest.mark.full)], indirect=True
)
def test_each_planted_fault_is_sent_once_and_a_good_run_only_its_end(
    inbox: tuple[Inbox, httpx.Client, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A kill, a hang and a NaN are three alerts although each is recovered within seconds.

    The first step lasts until both runs have been scraped: a counter whose first sample is 1 has not risen.
    """
    received, client, targets = inbox
    seconds = 8 if "[1s]" in request.node.name else 60
    slow = ["--inject", f"slow@rank0:step1:seconds={seconds}"]
    faults = ["--inject", "kill@rank1:step4", "--inject", "lock@rank1:step7"]
    common = [*slow, *STEPS]
    launched = {
        name: runs.Run(
            tmp_path, [*words, "--output-dir", name + "-out", *more], name=name, metrics="127.0.0.1:0"
        )
        for name, words, more in (("faulty", [*faults, *common], ["--nan-at", "11"]), ("good", common, []))
    }
    with ExitStack() as stack:
        for run in launched.values():
            stack.callback(run.close)
            run.start()
        addresses = [
            eventually(lambda run=run: re.search(r"http://([\d.]+:\d+)/metrics", run.printed()), "address")[1]
            for run in launched.values()
        ]
        targets.with_suffix(".new").write_text(json.dumps([{"targets": addresses}]))
        targets.with_suffix(".new").replace(targets)
        eventually(lambda: len(query(client, "up == 1")) == 2, "scrape of both runs")
        assert [run.wait() for run in launched.values()] == [0, 0], launched["faulty"].tail()
        ids = {name: run.status()["run_id"] for name, run in launched.items()}
        wanted = {"faulty": {"Fault", "Hang", "NonFinite", "Finished"}, "good": {"Finished"}}
        eventually(
            lambda: all(set(received.of(ids[name])) >= alerts for name, alerts in wanted.items()),
            f"alerts {wanted} among {received.received}",
        )
        for name, alerts in wanted.items():
            assert received.of(ids[name]) == dict.fromkeys(alerts, 1), name
        failed = query(client, "max_over_time(grpo_observation_failed[10m]) > 0")
        assert failed == [], "a scrape failed"
