"""`grpo-run demo`: the arithmetic recipe on two processes, a rank killed half-way, the picture of what became of it."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.record.journal import JournalReader
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_status

DEADLINE_SECONDS = 600.0
MARKER = ".grpo-run-demo"


def main(arguments: Sequence[str]) -> int:
    """Run the demo; 0 when training finished, the one fault was recovered and the picture is drawn."""
    parser = argparse.ArgumentParser(prog="grpo-run demo", description=__doc__)
    parser.add_argument(
        "--out", default="demo-out", metavar="DIR", help="replaced at each demo; default demo-out"
    )
    options = parser.parse_args(arguments)
    out = _empty(Path(options.out))
    run = RunDirectory(path=out / "run")
    began = time.monotonic()
    command = [
        _executable(), "train", "arithmetic", "--nproc-per-node", "2", "--run-dir", str(run.path),
        "--set", f"output_dir={out / 'model'}",
    ]  # fmt: skip
    print("$ " + " ".join(command), flush=True)
    with subprocess.Popen(command) as process:
        try:
            killed = _kill_half_way(run, process, began + DEADLINE_SECONDS)
            code = process.wait(timeout=max(1.0, DEADLINE_SECONDS - (time.monotonic() - began)))
        except BaseException:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()  # the ranks go with it
            raise
    return _report(run, out, code, killed, time.monotonic() - began)


def _executable() -> str:
    """The command itself, from the environment this interpreter belongs to."""
    found = shutil.which("grpo-run", path=str(Path(sys.executable).parent)) or shutil.which("grpo-run")
    if found is None:
        raise ConfigError("the grpo-run command is not beside this Python; install the package")
    return found


def _empty(out: Path) -> Path:
    """The demo's folder, empty; only a folder that an earlier demo made is ever removed."""
    if out.exists():
        if not (out / MARKER).is_file():
            raise ConfigError(f"{out} exists and no demo made it; give another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, mode=0o700)
    (out / MARKER).touch(mode=0o600)
    return out


def _kill_half_way(run: RunDirectory, process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """SIGKILL rank 1 in the middle of the last `train()` call, as the journal tells it; returns the step."""
    reader = JournalReader(run.journal)
    pid = 0
    while process.poll() is None and time.monotonic() < deadline:
        for event in reader.new():
            if event["event"] == "rank_started" and event["rank"] == 1:
                pid = int(event["pid"])
            if event["event"] == "step_committed" and _half_way(event):
                os.kill(pid, signal.SIGKILL)
                print(f"demo: killed rank 1 (pid {pid}) with SIGKILL after step {event['step']}", flush=True)
                return int(event["step"])
        time.sleep(0.02)
    return None


def _half_way(event: dict[str, Any]) -> bool:
    return bool(event["train_call"] == 2 and event["step"] >= event["target_steps"] // 2 + 5)


def _report(run: RunDirectory, out: Path, code: int, killed: int | None, seconds: float) -> int:
    """Draw, print the summary, and judge."""
    from rich.console import Console
    from rich.table import Table

    from grpo_run.dashboards.reward_plot import draw_run
    from grpo_run.runtime.record.journal import read_journal

    status = read_status(run)
    picture = out / "reward.png"
    console = Console(highlight=False, markup=False)
    console.print()
    console.print(status.sentence, style="bold")
    if code != 0 or killed is None:
        console.print(
            f"The demo did not go as planned: exit code {code}, rank killed at step {killed}. Journal: {run.journal}"
        )
        return code or 1
    drawn = draw_run(read_journal(run.journal), picture)
    recovered = [recovery for recovery in status.history.recoveries if recovery.recovery_seconds is not None]
    table = Table.grid(padding=(0, 2))
    table.add_row("reward, first 20 steps", f"{drawn.first_reward:.3f}")
    table.add_row("reward, last 20 steps", f"{drawn.last_reward:.3f}")
    table.add_row("faults recovered", f"{len(recovered)} of 1")
    for recovery in recovered:
        table.add_row(
            "  killed → next committed step",
            f"{recovery.recovery_seconds:.2f} s, {recovery.lost_steps} steps done again",
        )
    goodput = status.history.goodput()
    table.add_row(
        "goodput", "unknown" if goodput is None else f"{goodput:.0%} (start-up and both imports included)"
    )
    table.add_row("whole demo", f"{seconds:.0f} s")
    table.add_row("picture", str(picture))
    table.add_row("journal, logs, incident", str(run.path))
    console.print(table)
    return 0 if len(recovered) == 1 else 1
