"""docs/internals/step.md shows what a rank does in a step, in the order of a real run."""

from __future__ import annotations

from pathlib import Path

from support import step_page


def test_the_page_shows_the_order_of_a_real_step(tmp_path: Path) -> None:
    """`make generated` writes it."""
    text = step_page.PAGE.read_text(encoding="utf-8")
    assert step_page.page(text, step_page.record(tmp_path)) == text


def test_a_loop_has_the_same_events_as_a_trainer(tmp_path: Path) -> None:
    """A step of a loop ends when the next one is asked for."""
    events = [
        call["name"]
        for call in step_page.record(tmp_path, "loop", ranks=1)
        if call["kind"] == "event" and call["name"] in step_page.EVENTS
    ]
    begins, optimizer, ends, checkpoint = step_page.EVENTS
    assert events == [ends, checkpoint, begins, optimizer]
