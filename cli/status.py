"""`grpo-run status [RUN] [--json]`: show the state of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.dashboards.run_facts import memory_of
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.watchdog.text import duration_text, place_name, size_text, step_time_text


def main(arguments: Sequence[str]) -> int:
    """Print the status; returns 0 whatever the state of the run is."""
    parser = CommandParser(
        prog="grpo-run status", description="Show the state of a run, its ranks and its faults."
    )
    parser.add_run()
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    status = run_reader(find_run(options.run)).read()
    if options.json:
        print(json.dumps(status.as_json(), indent=2, ensure_ascii=False))
    else:
        print_text(status)
    return 0


def print_text(status: RunStatus) -> None:
    """Print the summary, then the facts, the ranks and the faults."""
    from rich.console import Console
    from rich.table import Table

    # no markup, because sentences quote the script; no folding, so that a pipe gets the summary in one line
    console = Console(highlight=False, markup=False, soft_wrap=True)
    fields, history = status.as_json(), status.history
    console.print(status.summary, style="bold")
    goodput, snapshot = fields["goodput"], history.snapshot_step
    nearest = None if status.host_memory is None else status.host_memory.nearest
    rows = {
        "run": status.run_id,
        "state": status.state,
        "step": _steps(status),
        "attempts": str(history.attempts),
        "goodput": "not known yet" if goodput is None else f"{goodput:.1%}",
        "checkpoint": _checkpoint(status),
        "snapshot": "" if snapshot is None else f"step {snapshot}",
        "disk": history.checkpoint_trouble or "",
        "memory": _memory(status),
        "host memory": "" if nearest is None else f"{nearest.fraction:.0%} of {nearest.name} in use",
        **history.facts(),
    }
    facts = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        if text:
            facts.add_row(name, text)
    console.print(facts)
    for host in status.hosts:
        console.print(f"  {host.line}")
    for rank in fields["ranks"]:
        console.print(f"  {_rank_line(rank, status.state)}")
    for note in (*history.pace(), *history.notes()):
        console.print(f"  {note}")
    for number, recovery in enumerate(history.recoveries, 1):
        console.print(f"{number}. {recovery.sentence or recovery.cause}")
        details = [
            recovery.cause,
            recovery.action,
            *_known("detected in {:.2f} s", recovery.detection_seconds),
            *_known("recovered in {:.2f} s", recovery.recovery_seconds),
            *_known(
                "1 step repeated" if recovery.lost_steps == 1 else "{} steps repeated", recovery.lost_steps
            ),
            *_known("{}", recovery.incident),
        ]
        console.print("   " + " · ".join(filter(None, details)), style="dim")
    if console.is_terminal:
        follow = "" if status.supervisor_pid is None else "-f "
        console.print(f"grpo-run logs {follow}{status.run_id} · grpo-run report {status.run_id}", style="dim")


def _checkpoint(status: RunStatus) -> str:
    """The newest checkpoint of the run, or what is said instead of it."""
    newest = status.history.checkpoint
    if newest is not None:
        verified = "verified" if newest.verified else "not verified"
        ended = status.history.exit_code is not None
        owner = _taken_by(newest.path, status.run_id) if ended else ""
        return f"step {newest.step}, {verified}, {newest.path}{owner}"
    if status.history.no_trainer.seen:
        return "none: nothing is saved"
    return "none yet" if status.history.exit_code is None else "none"


def _taken_by(path: str, run_id: str) -> str:
    """That another run has a checkpoint of its own there by now, as a clause; empty if not, or unknown."""
    with contextlib.suppress(CheckpointError):
        if (owner := read_manifest(Path(path)).run_id) != run_id:
            return f", where run {owner} has one of its own by now"
    return ""


def _memory(status: RunStatus) -> str:
    """The most that a rank has used, and in which phase: of the device if there is one; empty if unknown."""
    measured = [
        (own["by_phase"][own["phase"]], slot.rank, own)
        for slot, memory in zip(status.slots, status.memory, strict=False)
        if slot is not None and (own := memory_of(memory)) is not None and own["phase"]
    ]
    used, rank, own = max(measured, key=lambda one: one[:2], default=(0, 0, {}))
    if not used:
        return ""
    of = f" of {size_text(own['capacity_bytes'] or 0)}" if own["where"] == "device" else " on the host"
    return f"at most {size_text(used)}{of}, by rank {rank} in {own['phase']}"


def _steps(status: RunStatus) -> str:
    """Where training is, how long a step takes, and how long the rest takes at this pace."""
    history = status.history
    if history.no_trainer.seen and not history.counts_steps:
        return "not counted"
    if history.exit_code is not None and not history.counts_steps:
        return "none counted"  # the script has not used a Trainer
    seconds, remaining = history.step_seconds(), status.remaining_seconds
    texts = [f"{history.step} of {history.target_steps}" if history.target_steps else str(history.step)]
    if seconds is not None:
        texts.append(step_time_text(seconds))
    if remaining:
        texts.append(f"{duration_text(remaining)} left")
    return ", ".join(texts)


def _rank_line(rank: Mapping[str, Any], state: str) -> str:
    if not rank["observable"]:
        why = "has not started yet" if state == "starting" else "cannot be observed"
        return f"local rank {rank['local_rank']}: {why}"
    phase = rank["phase"]
    if rank["callback"] is not None:
        place = place_name(rank["callback"])
        phase = place if phase == "callback" else f"{phase} in {place}"
    if rank["trains_without_trainer"]:
        return f"rank {rank['rank']}: trains with no Trainer and no loop, pid {rank['pid']}"
    where = rank["state"] if phase is None else f"phase {phase} for {duration_text(rank['phase_seconds'])}"
    if rank["waits_for"] is not None:
        where += f", waits for rank {rank['waits_for']}"
    return f"rank {rank['rank']}: step {rank['step']}, {where}, pid {rank['pid']}"


def _known(text: str, value: object) -> list[str]:
    """Return the text with the value, or nothing if the value is not known."""
    return [] if value is None else [text.format(value)]
