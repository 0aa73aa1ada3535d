"""The report: it leads with the verdict, shows what is there, says what is not, and trusts no text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.incidents import HOSTILE, SENTENCE, write_incident

from grpo_run.dashboards.incident_report.contents import Report, find_incident, read_report
from grpo_run.dashboards.incident_report.page import NO_VERDICT, build
from grpo_run.dashboards.incident_report.timeline_chart import FEWEST_SECONDS, timeline_figure
from grpo_run.runtime.errors import RunDirectoryError

PLOTLY = "window.Plotly = null;"
"""Stands for five megabytes."""


class Page(HTMLParser):
    """What a browser would see: the text of every element, and the tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.append((tag, dict(attributes)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """What stood in it is over."""
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Text that is shown."""
        if not {"script", "style", "title"} & set(self._inside):
            self.words.append(data)


def read(root: Path, **changes: Any) -> Report:
    """A run with one incident, read."""
    run = write_incident(root, **changes)
    return read_report(run, find_incident(run, None))


def figures(page: str) -> dict[str, Any]:
    """The charts' data in a page."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    """Before any heading, number or chart."""
    page = build(read(tmp_path), PLOTLY)
    body = page[page.index("<body>") :]
    heading = re.search(r"<h(\d)>(.*?)</h\d>", body)
    assert heading is not None
    assert heading.groups() == ("1", SENTENCE)


def test_everything_known_is_on_the_page(tmp_path: Path) -> None:
    """Who, where, which line, who waits, what was done about it, how long it took, and what is missing."""
    text = Page(build(read(tmp_path), PLOTLY)).text
    for words in (
        "Cause collective_mismatch",
        "Who rank 1",
        "step 41, phase reward",
        "/home/me/train.py:88 in reward",
        "proved, by what the ranks left behind",
        "all_gather [8] Float on rank 1",
        "rank 2: /home/me/train.py:120 in <module>",
        "restart: first failure at this place",
        "Found out after 0.31 s",
        "Recovered after 1.71 s",
        "Steps done again 1",
        "move it out of the branch",
        "Ranks 0, 2, 3",
        "rank 3: no native stack",
        "checkpoint_published",
        "GPU 3",
        "83.9 GiB of 125.0 GiB",
    ):
        assert words in text


def test_the_culprits_stack_is_first_and_its_line_marked(tmp_path: Path) -> None:
    """Although its group is the smaller one."""
    page = build(read(tmp_path), PLOTLY)
    assert page.index("<header>Rank 1</header>") < page.index("<header>Ranks 0, 2, 3</header>")
    assert re.findall(r"<mark>(\S+) ", page) == ["reward", "&lt;module&gt;"]


def test_agreeing_collectives_are_one_line_and_others_are_set_off(tmp_path: Path) -> None:
    """Rank 1 called something else, rank 3 has not come so far."""
    page = build(read(tmp_path), PLOTLY)
    assert page.count('colspan="4"') == 9
    odd = re.findall(r'<td class="(?:code )?odd">(.*?)</td>', page)
    assert len(odd) == 2
    assert odd[0].startswith("all_gather [8] Float")
    assert odd[1] == "not called"


def test_flight_recorder_entries_do_where_no_notes_are(tmp_path: Path) -> None:
    """They know no line, but what was called and whether it is over."""
    run = write_incident(tmp_path)
    incident = find_incident(run, None)
    for file in (incident / "collectives").iterdir():
        file.unlink()
    entry = {
        "collective_seq_id": 7, "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "retired": False,
        "state": "scheduled", "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce",
    }  # fmt: skip
    (incident / "collectives" / "rank0.json").write_text(json.dumps({"entries": [entry]}))
    text = Page(build(read_report(run, incident), PLOTLY)).text
    assert "all_reduce [3, 4] Float enqueued" in text


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    """A message, a phase, a stack, an event and a name may hold markup; none of it becomes an element."""
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
    seen = Page(page)
    assert [tag for tag, _ in seen.tags].count("script") == 3
    assert not [tag for tag, _ in seen.tags if tag == "img"]
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    assert seen.text.count("<img src=x onerror=alert(1)>") >= 12


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    """No address is loaded, and its policy allows its own scripts only, by their digests."""
    seen = Page(build(read(tmp_path), PLOTLY))
    addresses = [
        value for _, attributes in seen.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert addresses == ["data:,"]
    policy = next(
        attributes["content"]
        for _, attributes in seen.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline'; img" in policy
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]


def test_an_incident_without_evidence_says_so(tmp_path: Path) -> None:
    """The supervisor may die while it gathers; an empty page would look like a healthy run."""
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


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    """A message of megabytes does not make the page unreadable."""
    assert len(build(read(tmp_path, sentence="x" * 3_000_000), PLOTLY)) < 200_000


def test_no_incident_is_named(tmp_path: Path) -> None:
    """Which there are, when the one asked for is none of them."""
    run = write_incident(tmp_path)
    assert (
        find_incident(run, "1") == find_incident(run, "0001-collective_mismatch") == find_incident(run, None)
    )
    for wanted in ("2", "x", "-1", "", "²"):
        with pytest.raises(RunDirectoryError, match="there are: 1"):
            find_incident(run, wanted)


def test_a_damaged_verdict_is_named(tmp_path: Path) -> None:
    """A report without its verdict would say nothing went wrong."""
    run = write_incident(tmp_path)
    incident = find_incident(run, None)
    (incident / "verdict.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"verdict\.json"):
        read_report(run, incident)


def test_open_phases_end_now_and_the_view_holds_them() -> None:
    """A hang of minutes is seen from its beginning; what came long before is a drag away."""
    spans = [["data", -1000, -900], ["generate", -900, -610], ["reward", -600.0, None]]
    figure = timeline_figure({"ranks": {"0": spans, "1": [["vote", -1, 0]]}, "now": 0}, {1})
    assert figure is not None
    (reward,) = (trace for trace in figure["data"] if trace["name"] == "reward")
    assert (reward["base"], reward["x"], reward["text"]) == ([-600.0], [600.0], ["600 s"])
    assert -1000 < figure["layout"]["xaxis"]["range"][0] < -600
    assert figure["layout"]["yaxis"]["categoryarray"] == ["<b>rank 1</b>", "rank 0"]


def test_a_short_run_is_not_drawn_in_a_void() -> None:
    """The view begins where the first phase did."""
    figure = timeline_figure({"ranks": {"0": [["startup", -3, None]]}, "now": 0}, ())
    assert figure is not None
    assert figure["layout"]["xaxis"]["range"][0] == -3
    assert FEWEST_SECONDS > 3


@pytest.mark.parametrize(
    "timeline", [{}, {"ranks": []}, {"ranks": {"x": []}}, {"ranks": {"0": ["a", [1], ["data", "b", None]]}}]
)
def test_a_strange_timeline_is_no_chart(timeline: dict[str, Any]) -> None:
    """Said on the page, never raised."""
    assert timeline_figure(timeline, ()) is None


def test_several_culprits_have_a_line_each(tmp_path: Path) -> None:
    """Where no single line is to blame."""
    text = Page(build(read(tmp_path, culprits=[0, 1], location=None), PLOTLY)).text
    assert "Line rank 0: /home/me/train.py:120 in <module> rank 1: /home/me/train.py:88 in reward" in text
