"""Counters of a run go on over restarts of its ranks and of its supervisor."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from support.runs import SCRIPTS, Run, Runs

from grpo_run.runtime.history.wall_states import WallState

Series = tuple[str, frozenset[tuple[str, str]]]


class Scraper:
    """Scrapes the exporter that a run has announced last, all the time, and compares counters."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._scrape_on)
        self.last: dict[Series, float] = {}
        """The newest value of everything that is counted."""
        self.fallen: list[str] = []
        """What has gone down."""
        self.scrapes = 0

    @contextlib.contextmanager
    def scraping(self) -> Iterator[None]:
        """Scrape meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _scrape_on(self) -> None:
        while not self._ended.wait(0.05):
            addresses = re.findall(r"http://[\d.]+:\d+/metrics", self._run.printed())
            if addresses:
                try:
                    with urllib.request.urlopen(addresses[-1], timeout=10) as answer:
                        text = answer.read().decode()
                except (OSError, http.client.HTTPException):  # no supervisor at present, or killed meanwhile
                    continue
                self._compare(text)

    def _compare(self, text: str) -> None:
        self.scrapes += 1
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                key = sample.name, frozenset(sample.labels.items())
                if sample.value < self.last.get(key, 0.0):
                    self.fallen.append(f"{sample.name}{sample.labels}: {self.last[key]} to {sample.value}")
                self.last[key] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series with these labels."""
        return sum(
            value
            for (found, having), value in self.last.items()
            if found == name and labels.items() <= having
        )


def test_counters_go_on_over_restarts_of_ranks_and_of_the_supervisor(runs: Runs) -> None:
    """Nothing that is counted ever goes down, and what was counted before each restart is in the last sum."""
    run = runs(
        "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", "out",
        "--max-steps", "32", "--save-steps", "5", "--step-seconds", "0.05", metrics="127.0.0.1:0",
    )  # fmt: skip
    scraper = Scraper(run)
    with scraper.scraping():
        run.start()
        for step in (6, 12):
            run.until_step(step)
            run.kill(1)
            run.until_event("attempt_started", count=step // 6 + 1)
        run.until(lambda _: scraper.total("grpo_rank_votes_total", rank="1") >= 18)
        before = scraper.total("grpo_rank_votes_total", rank="1")
        run.process.kill()
        run.process.wait(10)
        run.start().ended(0)
    assert scraper.fallen == []
    assert scraper.scrapes > 50
    assert scraper.total("grpo_attempts_total") == 4
    assert scraper.total("grpo_rank_votes_total", rank="1") >= before + 32 - 18 - 1
    assert scraper.total("grpo_rank_tokens_generated_total", rank="0") > 0
    phases = scraper.total("grpo_phase_duration_seconds_count", phase="optimizer")
    assert phases >= 2 * 30
    assert scraper.total("grpo_step_duration_seconds_count") >= 30
    assert scraper.total("grpo_faults_total", cause="signal", outcome="recovered") == 2
    assert scraper.total("grpo_recovery_duration_seconds_count") == 2
    assert scraper.total("grpo_checkpoints_total", result="published") >= 4
    wall = {state: scraper.total("grpo_wall_seconds_total", state=state.value) for state in WallState}
    assert [state for state, seconds in wall.items() if seconds <= 0] == []
