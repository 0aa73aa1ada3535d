"""The incident report: verdict first, evidence, missing evidence, and escaping of every text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.incidents import HOSTILE, SENTENCE, write_incident

from grpo_run.dashboards.incident_report.contents import IncidentReport, find_incident, read_report
from grpo_run.dashboards.incident_report.page import NO_VERDICT, build
from grpo_run.dashboards.incident_report.timeline_chart import MIN_SHOWN_SECONDS, timeline_figure
from grpo_run.runtime.errors import RunDirectoryError

PLOTLY = "window.Plotly = null;"
"""Stands in for the five megabytes of plotly.js."""


class Page(HTMLParser):
    """Parser of a page: the visible text, and all tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Record the tag."""
        self.tags.append((tag, dict(attributes)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the element and everything open inside it."""
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Collect visible text."""
        if not {"script", "style", "title"} & set(self._inside):
            self.words.append(data)


def read(root: Path, **changes: Any) -> IncidentReport:
    """Write a run with one incident, and read its report."""
    run = write_incident(root, **changes)
    return read_report(run, find_incident(run, None))


def figures(page: str) -> dict[str, Any]:
    """The data of the charts in a page."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    """The verdict's sentence is the first heading of the page."""
    page = build(read(tmp_path), PLOTLY)
    body = page[page.index("<body>") :]
    heading = re.search(r"<h(\d)>(.*?)</h\d>", body)
    assert heading is not None
    assert heading.groups() == ("1", SENTENCE)


def test_all_known_facts_are_on_the_page(tmp_path: Path) -> None:
    """Culprit, source line, waiting ranks, action, durations, advice and missing evidence are shown."""
    text = Page(build(read(tmp_path), PLOTLY)).text
    for words in (
        "Cause collective_mismatch",
        "Culprit rank 1",
        "Step and phase last completed step 41, phase reward",
        "/home/me/train.py:88 in reward",
        "proved: records or thread states of the ranks show the cause",
        "all_gather [8] Float on rank 1",
        "rank 2: /home/me/train.py:120 in <module>",
        "restart: first failure at this place",
        "Time to detect 0.31 s",
        "Time to recover 1.71 s",
        "Repeated steps 1",
        "move it out of the branch",
        "Ranks 0, 2 and 3",
        "rank 3: no native stack",
        "checkpoint_published",
        "GPU 3",
        "83.9 GiB of 125.0 GiB",
        "rank 0 7.7 GiB 9.2 GiB",
        "rank 0 forward backward 73.0 GiB 31.0 GiB 77.0 GiB 17 9.0 GiB 8.0 GiB",
        "rank 3 forward backward – – – – 9.0 GiB 8.0 GiB",
    ):
        assert words in text


def test_the_culprits_stack_is_first_and_its_line_is_highlighted(tmp_path: Path) -> None:
    """The culprit's stack comes first although its group is smaller."""
    page = build(read(tmp_path), PLOTLY)
    assert page.index("<header>Rank 1</header>") < page.index("<header>Ranks 0, 2 and 3</header>")
    assert re.findall(r"<mark>(\S+) ", page) == ["reward", "&lt;module&gt;"]


def test_identical_collectives_share_a_cell_and_others_are_highlighted(tmp_path: Path) -> None:
    """Rank 1 called another operation, and rank 3 has not made the call."""
    page = build(read(tmp_path), PLOTLY)
    assert page.count('colspan="4"') == 9
    highlighted = re.findall(r'<td class="(?:code )?mismatch">(.*?)</td>', page)
    assert len(highlighted) == 2
    assert highlighted[0].startswith("all_gather [8] Float")
    assert highlighted[1] == "not called"


def test_markup_in_values_is_escaped(tmp_path: Path) -> None:
    """Markup in a message, phase, stack, event or name does not become an element."""
    run = write_incident(
        tmp_path,
        sentence=HOSTILE,
        cause=HOSTILE,
        phase=HOSTILE,
        mismatch=HOSTILE,
        traceback=HOSTILE,
        advice=[HOSTILE],
        missing_evidence=[HOSTILE],
        location={"file": HOSTILE, "line": HOSTILE, "function": HOSTILE},
        confidence=HOSTILE,
        tried=[HOSTILE],
    )
    incident = find_incident(run, None)
    (incident / "timeline.json").write_text(json.dumps({"ranks": {"0": [[HOSTILE, -1, None]]}, "now": 0}))
    (incident / "stacks" / "folded.txt").write_text(
        f"rank 0:\n> {HOSTILE} ({HOSTILE}:1)\n", errors="backslashreplace"
    )
    (incident / "events.jsonl").write_text(json.dumps({"event": HOSTILE, "rank": HOSTILE, "text": HOSTILE}))
    (incident / "collectives" / "rank0.notes.json").write_text(
        json.dumps([{"group": HOSTILE, "sequence": 1, "operation": HOSTILE, "progress": HOSTILE}])
    )
    (incident / "memory" / "gpu.json").write_text(
        json.dumps({"devices": [{"index": HOSTILE, "processes": [{"pid": HOSTILE}]}]})
    )
    page = build(replace(read_report(run, incident), run_id=HOSTILE), PLOTLY)
    page.encode()
    parsed = Page(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 3
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert parsed.text.count("<img src=x onerror=alert(1)>") >= 12


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """The page refers to no address, and its policy allows only its own scripts, by their digests."""
    parsed = Page(build(read(tmp_path), PLOTLY))
    addresses = [
        value
        for _, attributes in parsed.tags
        for name, value in attributes.items()
        if name in ("src", "href")
    ]
    assert addresses == ["data:,"]
    policy = next(
        attributes["content"]
        for _, attributes in parsed.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline'; img" in policy
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]


def test_missing_evidence_is_reported(tmp_path: Path) -> None:
    """If the supervisor died while it gathered evidence, every section reports what is missing."""
    run = write_incident(tmp_path, name="0001-collecting")
    incident = find_incident(run, None)
    for file in [path for path in incident.rglob("*") if path.is_file()]:
        file.unlink()
    page = build(read_report(run, incident), PLOTLY)
    text = Page(page).text
    assert NO_VERDICT in text
    for words in ("No timeline", "No rank's stack", "No collective", "No rank's memory", "No events"):
        assert words in text
    assert figures(page) == {}
    assert PLOTLY not in page


def test_a_long_text_is_truncated(tmp_path: Path) -> None:
    """A message of three megabytes gives a page below 200 kB."""
    assert len(build(read(tmp_path, sentence="x" * 3_000_000), PLOTLY)) < 200_000


def test_an_incident_is_selected_by_number_or_name(tmp_path: Path) -> None:
    """The error for an unknown incident lists the known ones."""
    run = write_incident(tmp_path)
    assert (
        find_incident(run, "1") == find_incident(run, "0001-collective_mismatch") == find_incident(run, None)
    )
    for wanted in ("2", "x", "-1", "", "²"):
        with pytest.raises(RunDirectoryError, match="known incidents: 1"):
            find_incident(run, wanted)


def test_a_damaged_verdict_is_an_error(tmp_path: Path) -> None:
    """The error names verdict.json."""
    run = write_incident(tmp_path)
    incident = find_incident(run, None)
    (incident / "verdict.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"verdict\.json"):
        read_report(run, incident)


def test_open_phases_extend_to_the_incident_and_fit_in_the_view() -> None:
    """The initial view shows a long open phase from its start, but not what came long before."""
    spans = [["data", -1000, -900], ["generate", -900, -610], ["reward", -600.0, None]]
    figure = timeline_figure({"ranks": {"0": spans, "1": [["vote", -1, 0]]}, "now": 0}, {1})
    assert figure is not None
    (reward,) = (trace for trace in figure["data"] if trace["name"] == "reward")
    assert (reward["base"], reward["x"], reward["text"]) == ([-600.0], [600.0], ["600 s"])
    assert -1000 < figure["layout"]["xaxis"]["range"][0] < -600
    assert figure["layout"]["yaxis"]["categoryarray"] == ["<b>rank 1</b>", "rank 0"]


def test_the_view_of_a_short_run_starts_at_its_first_phase() -> None:
    """A run shorter than the minimum view leaves no empty space."""
    figure = timeline_figure({"ranks": {"0": [["startup", -3, None]]}, "now": 0}, ())
    assert figure is not None
    assert figure["layout"]["xaxis"]["range"][0] == -3
    assert MIN_SHOWN_SECONDS > 3


@pytest.mark.parametrize(
    "timeline", [{}, {"ranks": []}, {"ranks": {"x": []}}, {"ranks": {"0": ["a", [1], ["data", "b", None]]}}]
)
def test_a_malformed_timeline_gives_no_chart(timeline: dict[str, Any]) -> None:
    """A malformed timeline does not raise."""
    assert timeline_figure(timeline, ()) is None


def test_each_of_several_culprits_has_a_source_line(tmp_path: Path) -> None:
    """Without a single location, the source line of every culprit is shown."""
    text = Page(build(read(tmp_path, culprits=[0, 1], location=None), PLOTLY)).text
    assert (
        "Source line rank 0: /home/me/train.py:120 in <module> rank 1: /home/me/train.py:88 in reward" in text
    )
