"""The table of kinds of faults, and the help that shows it."""

from __future__ import annotations

from grpo_run.runtime.launch.injections import KINDS, help_text, parse_injection


def test_the_help_has_one_line_per_kind() -> None:
    """A line has the kind's sentence and default phase."""
    lines = help_text().splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS)
    for line, kind in zip(lines, KINDS.values(), strict=True):
        assert len(kind.sentence.split()) >= 3
        assert kind.sentence in line
        assert line.endswith(f"({kind.phase.name})")


def test_only_collectives_have_a_common_part() -> None:
    """The defaults of every kind are valid."""
    for name, kind in KINDS.items():
        assert kind.collective or not kind.common
        assert parse_injection(f"{name}@rank0:step1").phase is kind.phase
