"""The incident report: verdict first, evidence, missing evidence, and escaping of every text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.incidents import HOSTILE, write_incident
from support.transcripts import Story, stories

from grpo_run.dashboards.reports.charts import MIN_SHOWN_SECONDS, MOST_BARS, timeline_chart
from grpo_run.dashboards.reports.incident_contents import find_incident, read_report
from grpo_run.dashboards.reports.incident_page import NO_VERDICT, build
from grpo_run.runtime.errors import RunDirectoryError


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


def read(root: Path, **changes: Any) -> dict[str, Any]:
    """Write a run with one incident, and read its report."""
    run = write_incident(root, **changes)
    return read_report(run, find_incident(run, None))


def test_the_stack_of_our_own_exit_is_left_out(tmp_path: Path) -> None:
    """A rank that had failed is named without its stack; of the others, calls that start the script go."""
    run = write_incident(tmp_path)
    incident = find_incident(run, None)
    (incident / "stacks" / "folded.txt").write_text(
        "ranks 0 and 2:\n  join (threading.py:1123)\n  _exit (/opt/grpo/runtime/rank/bootstrap.py:248)\n"
        "  main (/opt/grpo/runtime/rank/bootstrap.py:74)\n\n"
        "rank 3:\n> main (/home/me/train.py:17)\n  _run_script (/opt/grpo/runtime/rank/bootstrap.py:171)\n"
        "  main (/opt/grpo/runtime/rank/bootstrap.py:71)\n"
    )
    page = build(read_report(run, incident))
    assert "bootstrap.py" not in page
    assert "/home/me/train.py:17" in page
    assert "Not shown: ranks 0 and 2, which had failed and were exiting." in Page(page).text


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
    event = {"event": HOSTILE, "rank": HOSTILE, "text": HOSTILE}
    (incident / "events.jsonl").write_text(json.dumps(event) + "\n")
    (incident / "collectives" / "rank0.notes.json").write_text(
        json.dumps([{"group": HOSTILE, "sequence": 1, "operation": HOSTILE, "progress": HOSTILE}])
    )
    (incident / "memory" / "gpu.json").write_text(
        json.dumps({"devices": [{"index": HOSTILE, "processes": [{"pid": HOSTILE}]}]})
    )
    page = build(read_report(run, incident) | {"run_id": HOSTILE})
    page.encode()
    parsed = Page(page)
    assert not [tag for tag, _ in parsed.tags if tag == "script"]
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert parsed.text.count("<img src=x onerror=alert(1)>") >= 12


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """The page refers to no address, and its policy allows no script and no connection."""
    parsed = Page(build(read(tmp_path)))
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
    assert policy.startswith("default-src 'none'; style-src ")
    assert "script-src" not in policy


def test_missing_evidence_is_reported(tmp_path: Path) -> None:
    """If the supervisor died while it gathered evidence, every section reports what is missing."""
    run = write_incident(tmp_path, name="0001-collecting")
    incident = find_incident(run, None)
    for file in [path for path in incident.rglob("*") if path.is_file()]:
        file.unlink()
    page = build(read_report(run, incident))
    text = Page(page).text
    assert NO_VERDICT in text
    for words in ("No timeline", "No rank's stack", "No collective", "No rank's memory", "No events"):
        assert words in text
    assert "<rect" not in page


def test_a_long_text_is_truncated(tmp_path: Path) -> None:
    """A message of three megabytes, and a traceback of ten, give a page below 300 kB."""
    assert len(build(read(tmp_path, sentence="x" * 3_000_000, traceback="y\n" * 5_000_000))) < 300_000


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
    """The view shows a long open phase from its start, but not what came long before."""
    spans = [["data", -1000, -900], ["generate", -900, -610], ["reward", -600.0, None]]
    chart = timeline_chart({"ranks": {"0": spans, "1": [["vote", -1, 0]]}, "now": 0}, {1})
    assert chart is not None
    assert -1000 < chart["begin_seconds"] < -600
    assert [(row["rank"], row["culprit"], row["open_text"]) for row in chart["rows"]] == [
        (0, False, "reward for 600 s"),
        (1, True, ""),
    ]
    assert [name for name, _ in chart["legend"]] == ["generate", "reward", "vote"]
    reward = re.search(r'x="([\d.]+)" y="0" width="([\d.]+)"[^>]*><title>reward', chart["rows"][0]["bars"])
    assert reward is not None
    assert float(reward[1]) + float(reward[2]) == pytest.approx(1000, abs=0.2)


def test_the_view_of_a_short_run_starts_at_its_first_phase() -> None:
    """A run shorter than the minimum view leaves no empty space."""
    chart = timeline_chart({"ranks": {"0": [["startup", -3, None]]}, "now": 0}, ())
    assert chart is not None
    assert chart["begin_seconds"] == -3
    assert MIN_SHOWN_SECONDS > 3


def test_a_timeline_of_many_ranks_is_bounded() -> None:
    """The longest phases and the open ones are drawn."""
    spans = [["vote", -14 + number / 100, -14 + number / 100 + 1e-4 * (number + 1)] for number in range(500)]
    ranks = {str(rank): [*spans, ["reward", -1, None]] for rank in range(100)}
    chart = timeline_chart({"ranks": ranks, "now": 0}, ())
    assert chart is not None
    drawn = sum(row["bars"].count("<rect") for row in chart["rows"])
    assert 100 <= drawn <= MOST_BARS + 100
    assert all("still open" in row["bars"] for row in chart["rows"])


@pytest.mark.parametrize(
    "timeline", [{}, {"ranks": []}, {"ranks": {"x": []}}, {"ranks": {"0": ["a", [1], ["data", "b", None]]}}]
)
def test_a_malformed_timeline_gives_no_chart(timeline: dict[str, Any]) -> None:
    """A malformed timeline does not raise."""
    assert timeline_chart(timeline, ()) is None


class PageShell:
    """An incident, and its page."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def page(self, **changes: Any) -> str:
        """The title and the body, without pictures; changes are of the verdict."""
        text = build(read(self.root, **changes))
        text = re.sub(r"(?s)<svg.*?</svg>", "<svg>", text[text.index("<title>") :])
        text = re.sub(r"(?s)<style.*?</style>", "", text).replace(str(self.root), "HERE")
        return "\n".join(line.strip() for line in text.splitlines() if line.strip())

    def head(self, culprits: str = "", cause: str = "collective_mismatch", **place: str) -> str:
        """The same up to the stacks."""
        location = {**place, "line": int(place["line"])} if place else None
        changes = {"culprits": list(range(int(culprits)))} if culprits else {}
        return self.page(cause=cause, location=location, **changes).partition("<h2>Stacks")[0]


@stories(__file__, "incident_page.txt")
def test_page(story: Story, word: str, tmp_path: Path) -> None:
    """Every story of the file."""
    story.check(PageShell(tmp_path), word)
