"""The report of a whole run: wall time, curves, faults; small, and safe whatever a script says."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from support.incidents import HOSTILE
from support.journal import event
from support.night import STEP_SECONDS, write_night

from grpo_run.dashboards.reports.run_contents import read_run_report
from grpo_run.dashboards.reports.run_page import as_html, as_json, as_markdown, wall_rows
from grpo_run.runtime.history.journal import Journal

EVIL = HOSTILE + " \x1b[2J\x1b]0;taken\x07 \x00 \x9b31m \u202e | `x` [a](javascript:alert(1))"


def test_wall_time_is_complete_and_drawn_as_a_waterfall(tmp_path: Path) -> None:
    """Each bar begins where the one before ends, and the last one ends at the end."""
    report = read_run_report(write_night(tmp_path, steps=100))
    assert report["began_at"] is not None
    assert report["ended_at"] is not None
    assert sum(report["wall_seconds"].values()) == pytest.approx(report["ended_at"] - report["began_at"])
    assert report["wall_seconds"]["productive"] == pytest.approx(100 * STEP_SECONDS)
    assert report["wall_seconds"]["redone"] == pytest.approx(7 * STEP_SECONDS, abs=1)
    rows = wall_rows(report)
    for one, following in itertools.pairwise(rows):
        assert one["left"] + one["width"] == pytest.approx(following["left"])
    assert rows[-1]["left"] + rows[-1]["width"] == pytest.approx(100)


def test_recoveries_and_steps_done_again_are_marked(tmp_path: Path) -> None:
    """At the steps of their curves."""
    report = read_run_report(write_night(tmp_path, steps=100))
    assert [(mark["step"], mark["redone_from"]) for mark in report["marks"]] == [(57, 50)]
    page = as_html(report)
    assert page.count('class="fault"') == page.count('<rect class="redone"') == 1
    assert page.count('<use href="#marks"/>') == page.count('class="card curve"') == 4
    assert [point[0] for point in report["curves"]["reward"]] == list(range(1, 101))


@pytest.mark.parametrize(
    ("steps", "between"), [(20_000, 65), pytest.param(100_000, 330, marks=pytest.mark.full)]
)
def test_the_report_of_a_long_run_is_small_and_keeps_extremes(
    steps: int, between: int, tmp_path: Path
) -> None:
    """With 300 faults: below 1 MB, made within seconds, with the one high reward."""
    faults = tuple(range(305, 305 + 300 * between, between))
    run = write_night(tmp_path, steps=steps, faults=faults)
    began = time.process_time()
    report = read_run_report(run)
    page = as_html(report)
    assert time.process_time() - began < 10
    assert len(page.encode()) < 1_000_000
    assert len(as_json(report)) < 1_000_000
    assert max(point[3] for point in report["curves"]["reward"]) > 5
    assert all(len(points) <= 600 for points in report["curves"].values())
    assert len(report["incidents"]) == 200
    assert report["omitted"] == 100


def test_hostile_texts_break_no_format(tmp_path: Path) -> None:
    """Control characters are shown as pictures; markup is escaped in the page and in Markdown."""
    report = read_run_report(write_night(tmp_path, steps=60, sentence=EVIL + "x" * 16_000))
    page, markdown, data = as_html(report), as_markdown(report), as_json(report)
    for text in (page, markdown, data):
        text.encode()
        assert len(text) < 200_000
        assert not {"\x1b", "\x00", "\x07", "\x9b", "\u202e"} & set(text)
    assert "<script>" not in page
    assert "<img" not in page
    row = next(line for line in markdown.splitlines() if "onerror" in line)
    assert "\\<img" in row
    assert row.replace("\\|", "").count("|") == 9
    assert json.loads(data)["incidents"][0]["sentence"].startswith("</script>")


def test_the_environment_is_not_in_the_report(tmp_path: Path) -> None:
    """Only versions of what a run records of its inputs."""
    report = read_run_report(write_night(tmp_path, steps=60))
    assert "SECRET" not in as_html(report) + as_json(report)
    assert report["versions"] == {"torch": "2.13.0", "trl": "1.16.0"}


def test_a_run_without_events_has_a_report(tmp_path: Path) -> None:
    """Every section says what is missing."""
    run = write_night(tmp_path, steps=1, faults=())
    run.journal.write_text("")
    page = as_html(read_run_report(run))
    assert "Nothing has been recorded yet." in page
    assert "Nothing has been logged." in page
    as_markdown(read_run_report(run))


def test_the_pace_of_phases_is_drawn_from_zero(tmp_path: Path) -> None:
    """With what got slower; a run of under a hundred steps has no such section."""
    run = write_night(tmp_path, steps=20, faults=())
    assert "Pace" not in as_html(read_run_report(run))
    journal = Journal(run.journal, "night")
    for step in (100, 200, 300):
        seconds = {"generate": 0.5 + step / 1e5, "Scan.on_log": step / 1000}
        journal.write(event("phase_costs", rank=0, step=step, train_call=1, seconds=seconds))
    sentence = "steps get slower: callback Scan.on_log <b>"
    journal.write(event("growth_found", rank=0, step=300, phase="Scan.on_log", factor=3.0, sentence=sentence))
    report = read_run_report(run)
    assert list(report["phases"]) == ["generate", "Scan.on_log"]
    page = as_html(report)
    assert "generate, seconds from step 100 to 300: from 0 to 0.503" in page
    assert "callback Scan.on_log &lt;b&gt;" in page
    assert "- steps get slower" in as_markdown(report)


def test_time_that_bought_no_gradient_is_told(tmp_path: Path) -> None:
    """Half of the groups have equal rewards, seven steps were done again, and two had no sample."""
    run = write_night(tmp_path, steps=100)
    text = run.journal.read_text().replace('"loss":', '"zero_variance_groups": 0.5, "loss":')
    run.journal.write_text(text)
    Journal(run.journal, "night").write(
        event("group_masked", rank=0, step=90, count=4, of=4, steps_without_samples=2)
    )
    report = read_run_report(run)
    hours = {why: 3600 / 2 * one for why, one in report["no_gradient"]["hours"].items()}
    assert hours == {
        "groups with equal rewards": pytest.approx(50 * STEP_SECONDS),
        "no sample was left": pytest.approx(2 * STEP_SECONDS, rel=0.1),
        "steps done again": pytest.approx(7 * STEP_SECONDS, abs=1),
    }
    sentence = "bought no gradient: groups with equal rewards"
    assert sentence in as_html(report)
    assert sentence in as_markdown(report)
    assert sentence not in as_html(read_run_report(write_night(tmp_path / "b", steps=50, faults=())))


def test_curves_of_a_report_are_in_groups(tmp_path: Path) -> None:
    """Each reward function is a line with its name, which may be anything."""
    run = write_night(tmp_path, steps=20, faults=())
    functions = {f"length{EVIL}": {"mean": 0.5, "std": 0.1}, "format": {"mean": 1.0, "std": 0.0}}
    Journal(run.journal, "night").write(
        event("step_logged", rank=0, step=20, train_call=1, reward_functions=functions)
    )
    page = as_html(read_run_report(run))
    groups = [page.index(f"<h3>{name}</h3>") for name in ("Learning", "Rollouts", "Machine")]
    assert groups == sorted(groups)
    assert page.index("Reward of each function") < groups[1]
    assert '<i class="l1"></i>format 1' in page
    assert "<img" not in page
