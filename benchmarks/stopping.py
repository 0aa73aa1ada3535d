"""Measure the time from SIGTERM until `grpo-run launch` has exited, and count the checkpoints that the stop
writes.

A GRPO script with a slow save trains on two ranks. Each run is stopped at a random moment after its third
step, so that the signal meets rollouts, updates and snapshots. The bound is two steps, one save and two
seconds; steps and saves are measured in the same run. The saves of a stop are counted in the journal.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine

SCRIPT = machine.REPOSITORY / "tests" / "scripts" / "slow_saves.py"
ALLOWANCE_SECONDS = 2.0
START_SECONDS = 180.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One stop. `seconds` is from the signal to the exit, `saves` counts those that ended after the
    request.
    """

    seconds: float
    step_seconds: float
    save_seconds: float
    saves: int
    exit_code: int

    @property
    def bound_seconds(self) -> float:
        """Two steps, one save and an allowance."""
        return 2 * self.step_seconds + self.save_seconds + ALLOWANCE_SECONDS


def measure(folder: Path, step_seconds: float, save_seconds: float, every: int, after: float) -> Sample:
    """Start a run, stop it `after` seconds after its third step, and return what the stop took."""
    command = [
        Path(sys.executable).with_name("grpo-run"), "launch", "--metrics-addr", "off", "--run-dir",
        folder / "run",
        "--snapshot-every", str(every), "--nproc-per-node", "2", SCRIPT, "--save-seconds", str(save_seconds),
        "--output-dir", "out", "--max-steps", "1000", "--save-steps", "1000", "--step-seconds",
        str(step_seconds),
    ]  # fmt: skip
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not any(event["step"] >= 3 for event in events(folder, "step_committed")):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"the run did not start:\n{(folder / 'output').read_text()[-3000:]}")
            time.sleep(0.02)
        time.sleep(after)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code = process.wait(600)
        seconds = time.monotonic() - began
    finally:
        process.kill()
    (stop,) = events(folder, "stop_requested")
    staged = events(folder, "checkpoint_staged")
    first, *_, last = events(folder, "step_committed")
    saving = sum(
        event["seconds"] for event in staged if first["committed_at"] < event["time"] <= last["committed_at"]
    )
    return Sample(
        seconds=seconds,
        step_seconds=(last["committed_at"] - first["committed_at"] - saving) / (last["step"] - first["step"]),
        save_seconds=max(event["seconds"] for event in staged),
        saves=sum(event["time"] >= stop["time"] for event in staged),
        exit_code=code,
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of one name in the run's journal."""
    journal = folder / "run" / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--save-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    console, chance = Console(), random.Random(arguments.seed)
    result: dict[str, Any] = {"machine": machine.facts(), "samples": []}
    table = Table(title="SIGTERM to exit", caption="snapshots every 1, 2, 3 steps in turn")
    for column in ("snapshots every", "seconds", "bound", "checkpoints of the stop", "exit code"):
        table.add_column(column, justify="right")
    for number in range(arguments.stops):
        every = number % 3 + 1
        after = chance.uniform(0.0, arguments.step_seconds + arguments.save_seconds)
        with tempfile.TemporaryDirectory() as folder:
            sample = measure(Path(folder), arguments.step_seconds, arguments.save_seconds, every, after)
        result["samples"].append({"every": every, "after": after, **asdict(sample)})
        row = (
            f"{sample.seconds:.1f}",
            f"{sample.bound_seconds:.1f}",
            str(sample.saves),
            str(sample.exit_code),
        )
        table.add_row(str(every), *row)
    console.print(table)
    machine.finish(console, result, arguments.json)


if __name__ == "__main__":
    main()
