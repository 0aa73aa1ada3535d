"""Kept completions are read by rollout and group, and nothing in the files breaks the page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_run.dashboards.live.samples import MAX_READ_BYTES, MAX_TEXT, SHOWN_ROLLOUTS, SampleReader, groups_of


def row(step: int, group: int, position: int, **changes: Any) -> dict[str, Any]:
    """What a rank writes of one completion."""
    fields = {"prompt": f"p{group}", "completion": f"c{position}", "tokens": 3, "ended": "eos"}
    at = {"train_call": 1, "step": step, "attempt": 0, "group": group, "position": position}
    return {**at, **fields, "rewards": {"length": 0.5, "format": None}, **changes}


def texts(groups: list[dict[str, Any]]) -> list[tuple[int, int, list[str]]]:
    """Step, group and completions of each group."""
    return [(one["step"], one["group"], [each["text"] for each in one["completions"]]) for one in groups]


def test_groups_are_put_together_from_all_ranks() -> None:
    """The newest rollout first, the completions of a group in order."""
    rows = [row(2, 0, 1), row(1, 0, 0), row(2, 1, 0), row(2, 0, 0)]
    assert texts(groups_of(rows)) == [(2, 0, ["c0", "c1"]), (2, 1, ["c0"]), (1, 0, ["c0"])]


def test_a_repeated_rollout_replaces_the_one_before() -> None:
    """Whichever rank's file is read first."""
    rows = [row(2, 0, 0, attempt=1, completion="new"), row(2, 0, 0), row(2, 0, 1), row(1, 0, 0)]
    assert texts(groups_of(rows)) == [(2, 0, ["new"]), (1, 0, ["c0"])]
    assert texts(groups_of(rows[::-1])) == [(2, 0, ["new"]), (1, 0, ["c0"])]


def test_only_the_last_rollouts_are_shown() -> None:
    """With what is longest cut."""
    groups = groups_of([row(step, 0, 0, completion="\x1b" * 100_000) for step in range(100)])
    assert [one["step"] for one in groups] == list(range(99, 99 - SHOWN_ROLLOUTS, -1))
    text = groups[0]["completions"][0]["text"]
    assert len(text) < MAX_TEXT + 100
    assert "\x1b" not in text


def test_files_are_read_as_they_grow(tmp_path: Path) -> None:
    """None without a file; half a line, and lines that are no rows, are left out."""
    reader = SampleReader(tmp_path)
    assert reader.newest() is None
    file = tmp_path / "rank0.jsonl"
    file.write_text("\n".join([json.dumps(row(1, 0, 0)), "[]", "{}", "x", "1e999", json.dumps(row(1, 0, 1))]))
    assert texts(reader.newest() or []) == [(1, 0, ["c0"])]
    with file.open("a") as opened:
        opened.write("\n" + json.dumps(row(1, 0, 2, rewards=7)) + "\n")
    assert texts(reader.newest() or []) == [(1, 0, ["c0", "c1"])]


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    """A rank may have written up to 8 MiB."""
    line = (json.dumps(row(1, 0, 0)) + "\n").encode()
    (tmp_path / "rank0.jsonl").write_bytes(b"x" * MAX_READ_BYTES + b"\n" + line)
    assert texts(SampleReader(tmp_path).newest() or []) == [(1, 0, ["c0"])]
    assert os.stat(tmp_path / "rank0.jsonl").st_size > MAX_READ_BYTES
