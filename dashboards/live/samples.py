"""Read the completions that ranks keep under `--log-completions`, for the live page.

The files grow while they are read; damaged lines are left out. Every text is cleaned and cut. Changes
nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.run_facts import MAX_LABEL
from grpo_run.watchdog.evidence.incident_files import read_end

MAX_READ_BYTES = 1024 * 1024
"""How much of the end of each file is read."""
SHOWN_ROLLOUTS = 6
MAX_TEXT = 4_000


class SampleReader:
    """The newest groups of a run; reads the files only when they have changed.

    Args:
        folder: of the files, one per rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, tuple[int, int]] = {}
        self._newest: list[dict[str, Any]] | None = None

    def newest(self) -> list[dict[str, Any]] | None:
        """Return the last groups, newest first; None if the run keeps none."""
        try:
            files = sorted(self._folder.glob("rank*.jsonl"))
            sizes = {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
        except OSError:
            return self._newest  # replaced at this moment
        if sizes != self._sizes:
            self._sizes = sizes
            self._newest = groups_of([row for file in files for row in _rows(file)])
        return self._newest


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        end = read_end(file, MAX_READ_BYTES)
    except OSError:
        return []
    rows = []
    for line in end.split(b"\n")[len(end) == MAX_READ_BYTES : -1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the end of a file on a disk that was full
        if isinstance(row, dict):
            rows.append(row)
    return rows


def groups_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of the last rollouts, newest first, from what all ranks have written.

    A rollout that was repeated after a fault replaces the one before.
    """
    groups: dict[tuple[int, int, int], dict[int, dict[str, Any]]] = {}
    prompts: dict[tuple[int, int, int], str] = {}
    attempts: dict[tuple[int, int], int] = {}
    for row in rows:
        try:
            at = int(row["train_call"]), int(row["step"])
            attempt, group, position = int(row["attempt"]), int(row["group"]), int(row["position"])
            shown = _completion(row)
        except (LookupError, TypeError, ValueError):
            continue  # of another version
        if attempt < attempts.get(at, attempt):
            continue
        if attempt > attempts.get(at, attempt):
            groups = {key: kept for key, kept in groups.items() if key[:2] != at}
        attempts[at] = attempt
        groups.setdefault((*at, group), {})[position] = shown
        prompts.setdefault((*at, group), clean(row.get("prompt") or "", MAX_TEXT))
    rollouts = sorted({key[:2] for key in groups})[-SHOWN_ROLLOUTS:]
    return [
        {
            "train_call": call,
            "step": step,
            "group": group,
            "prompt": prompts[call, step, group],
            "completions": [kept[position] for position in sorted(kept)],
        }
        for (call, step, group), kept in sorted(
            groups.items(), key=lambda item: (-item[0][0], -item[0][1], item[0][2])
        )
        if (call, step) in rollouts
    ]


def _completion(row: dict[str, Any]) -> dict[str, Any]:
    rewards = {
        clean(name, MAX_LABEL): None if value is None or not math.isfinite(value) else float(value)
        for name, value in dict(row["rewards"]).items()
    }
    return {
        "text": clean(row["completion"], MAX_TEXT),
        "tokens": int(row["tokens"]),
        "ended": clean(row.get("ended") or "", MAX_LABEL),
        "rewards": rewards,
    }
