"""The picture of memory over a step: valid, self-contained, and true to its figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from grpo_run.dashboards.memory_plot import draw
from grpo_run.runtime.planning.series import StepPhase

GIB = float(1 << 30)
NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def _picture(limit_gib: float | None, title: str = "A job") -> str:
    phases = [
        StepPhase(name="forward",
        instants=[{"weights": GIB, "activations": size * GIB} for size in (0, 2)], spread_bytes=0),
        StepPhase(name="backward", instants=[{"weights": GIB, "logits": size * GIB} for size in (3, 1)],
        spread_bytes=GIB / 2),
    ]  # fmt: skip
    limit = None if limit_gib is None else limit_gib * GIB
    return draw(phases, title=title, subtitle="of a model", limit_bytes=limit)


def _texts(picture: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(picture).iterfind(".//svg:text", NAMESPACE)]


@pytest.mark.parametrize("limit", [None, 0.5, 6, 80])
def test_a_picture_is_valid_and_always_the_same(limit: float | None) -> None:
    """Whatever the limit is."""
    picture = _picture(limit)
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert picture == _picture(limit)


def test_nothing_is_loaded_and_names_are_escaped() -> None:
    """A model's name may contain anything."""
    picture = _picture(6, title="<script>alert(1)</script>")
    assert not re.search(r"<script|<image|<a |@import|url\((?!#)", picture)
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\"]*", picture)} == {"www.w3.org"}
    assert "<script>alert(1)</script>" in _texts(picture)


def test_the_binding_instant_is_the_highest_with_its_range() -> None:
    """4 GiB in backward, up to 4.5."""
    texts = _texts(_picture(6))
    assert "backward binds: 4.00 to 4.50 GiB" in texts
    assert "logits 3.00, weights 1.00" in texts


def test_only_what_can_be_seen_is_in_the_legend() -> None:
    """No gradients here."""
    texts = _texts(_picture(6))
    assert {"weights", "activations", "logits"} <= set(texts)
    assert "gradients" not in texts


def test_a_limit_far_above_is_said_and_does_not_press_the_curve_flat() -> None:
    """Within four times the curve it is a line."""
    assert "GPU: 80.0 GiB, far above" in _texts(_picture(80))
    assert "GPU: 6.0 GiB" in _texts(_picture(6))
