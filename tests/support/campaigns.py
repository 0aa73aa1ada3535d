"""`pytest --campaigns`: print the plan of the long campaigns at the start, and durations at the end.

A campaign is a test function with cases marked `full`. Durations are kept in `tests/campaigns.json`, in
seconds by test function; commit the file after a complete run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parent.parent / "campaigns.json"


class Campaigns:
    """Pytest plugin that measures campaigns."""

    def __init__(self) -> None:
        self.last: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        self.sizes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.began = time.monotonic()

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        """Print one line per campaign: name, number of cases, last known duration."""
        self.sizes = Counter(name(item.nodeid) for item in items if item.get_closest_marker("full"))
        lines = [
            f"  {campaign}: {count} cases, {duration(self.last.get(campaign))}"
            for campaign, count in sorted(self.sizes.items())
        ]
        known = sum(self.last.get(campaign, 0.0) for campaign in self.sizes)
        unknown = sum(campaign not in self.last for campaign in self.sizes)
        total = f"last known total {duration(known)}, {unknown} without a record"
        return [f"{len(self.sizes)} campaigns with {sum(self.sizes.values())} cases; {total}:", *lines]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a case's duration to its campaign."""
        campaign = name(report.nodeid)
        if "full" in report.keywords:
            self.seconds[campaign] += report.duration
            if report.failed:
                self.failed.add(campaign)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print and record the durations of this run."""
        terminalreporter.section("campaigns")
        for campaign, seconds in self.seconds.most_common():
            result = "failed" if campaign in self.failed else "passed"
            terminalreporter.write_line(
                f"  {campaign}: {self.sizes[campaign]} cases {result} in {duration(seconds)},"
                f" last time {duration(self.last.get(campaign))}"
            )
        terminalreporter.write_line(f"  everything: {duration(time.monotonic() - self.began)}")
        done = {name: round(seconds) for name, seconds in self.seconds.items() if name not in self.failed}
        RECORD.write_text(json.dumps(dict(sorted({**self.last, **done}.items())), indent=2) + "\n")


def name(nodeid: str) -> str:
    """Return the test function of a case."""
    return nodeid.partition("[")[0]


def duration(seconds: float | None) -> str:
    """Return a duration for people."""
    if seconds is None:
        return "no record"
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {round(seconds) % 60} s"
