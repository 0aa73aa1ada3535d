"""`grpo-run status [RUN_DIR] [--json]`: how a run stands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from grpo_run.runtime.record.run_directory import find_run
from grpo_run.runtime.record.status import RunStatus, read_status


def main(arguments: Sequence[str]) -> int:
    """Print the status; 0 whatever it is, since asking worked."""
    parser = argparse.ArgumentParser(prog="grpo-run status", description=__doc__)
    parser.add_argument("run", nargs="?", help="run directory or run id; default: the newest under runs/")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    status = read_status(find_run(options.run))
    if options.json:
        print(json.dumps(status.as_json(), indent=2, ensure_ascii=False))
    else:
        print_for_person(status)
    return 0


def print_for_person(status: RunStatus) -> None:
    """The verdict sentence, then the facts under it."""
    from rich.console import Console
    from rich.table import Table

    # no markup: a sentence quotes the script's words; no folding: its first line is one line in a pipe too
    console = Console(highlight=False, markup=False, soft_wrap=True)
    fields = status.as_json()
    console.print(status.sentence, style="bold")
    goodput = fields["goodput"]
    checkpoint = fields["checkpoint"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", status.run_id)
    facts.add_row("state", status.state)
    facts.add_row("step", f"{fields['step']} of {fields['target_steps']}")
    facts.add_row("attempts", str(fields["attempts"]))
    facts.add_row("goodput", "unknown yet" if goodput is None else f"{goodput:.1%}")
    facts.add_row(
        "checkpoint",
        "none yet"
        if checkpoint is None
        else f"step {checkpoint['step']}, {'verified' if checkpoint['verified'] else 'not verified'}, {checkpoint['path']}",
    )
    if fields["snapshot_step"] is not None:
        facts.add_row("in memory", f"step {fields['snapshot_step']}")
    if fields["checkpoint_trouble"] is not None:
        facts.add_row("disk", fields["checkpoint_trouble"])
    console.print(facts)
    for rank, slot in enumerate(status.slots):
        if slot is None:
            console.print(f"  local rank {rank}: cannot be observed")
        else:
            phase = slot.phase.name if slot.phase else "none"
            console.print(f"  rank {slot.rank}: step {slot.step}, phase {phase}, pid {slot.pid}")
    for number, recovery in enumerate(status.history.recoveries, 1):
        console.print(f"{number}. {recovery.sentence or recovery.cause}")
        details = [
            recovery.cause,
            recovery.action,
            *_told("detected in {:.2f} s", recovery.detection_seconds),
            *_told("recovered in {:.2f} s", recovery.recovery_seconds),
            *_told("{} steps done again", recovery.lost_steps),
            *_told("{}", recovery.incident),
        ]
        console.print("   " + " · ".join(filter(None, details)), style="dim")


def _told(text: str, value: object) -> list[str]:
    """A fact that is known, in words."""
    return [] if value is None else [text.format(value)]
