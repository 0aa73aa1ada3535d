"""Everything that waits for a GPU, as one command of at most nine minutes, which writes a dated table: equal
weights after a kill, a hang, a real out-of-memory fault, memory snapshots, and predicted memory.

    benchmarks/gpu.py --output docs/reference/gpu.md

Each row is a real run on one GPU. A row that there is no time for is listed as not run. `--device cpu` tries
the program itself on a machine without a GPU; the rows that need one are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.launchers import BIN, OURS, SCRIPT, environment

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reader import read_journal

NO_GPU = 2
MOST_SECONDS = 540.0
RUN_SECONDS = 150.0
STEPS = 16
FAULT_STEP = 11
LIMITED = SCRIPT.with_name("limited_gpu.py")
SHARE_OF_PEAK = 0.8
"""A run with so much of the memory that it takes cannot go on as it is."""
GIB = float(1 << 30)


class Failed(Exception):
    """A run did not end as it should. The message has its last lines."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was tried, whether it held, and the figure."""

    what: str
    held: bool | None
    figure: str


class Trial:
    """The runs of one invocation, each in a folder of its own.

    Args:
        folder: for all runs.
        device: `cuda` or `cpu`.
        size: millions of parameters of the model.
    """

    def __init__(self, folder: Path, device: str, size: float) -> None:
        self.folder, self.cpu, self.size = folder, device == "cpu", size
        self.ends_at = time.monotonic() + MOST_SECONDS
        self._runs = 0

    def script(self, folder: Path, *more: str) -> list[str]:
        """Return the arguments of the training script."""
        words = [
            "--output-dir", str(folder / "out"), "--step-log", str(folder / "steps"),
            "--size", str(self.size),
        ]  # fmt: skip
        words += ["--max-steps", str(STEPS), "--per-device-train-batch-size", "16", "--num-generations", "8"]
        return [*words, *(["--cpu"] if self.cpu else []), *more]

    def plain(self) -> str:
        """Train under torchrun; return the digest of the weights."""
        folder = self._new()
        self._run([str(BIN / "torchrun"), "--standalone", str(SCRIPT), *self.script(folder)])
        return _digest(folder)

    def launch(self, *options: str, script: tuple[str, ...] = (str(SCRIPT),)) -> tuple[Path, History]:
        """Train under grpo-run; return the run's folder and history."""
        folder = self._new()
        words = [
            str(BIN / "grpo-run"), "launch", "--fresh", "--metrics-addr", "off",
            "--run-dir", str(folder / "run"),
        ]  # fmt: skip
        self._run([*words, *options, *script, *self.script(folder)])
        return folder, History.of(read_journal(folder / "run" / "journal.jsonl"))

    def _new(self) -> Path:
        self._runs += 1
        folder = self.folder / str(self._runs)
        folder.mkdir()
        return folder

    def _run(self, words: list[str]) -> None:
        left = min(RUN_SECONDS, self.ends_at - time.monotonic())
        if left <= 1:
            raise TimeoutError
        variables = environment(OURS)
        if not self.cpu:
            del variables["DS_ACCELERATOR"]
        done = subprocess.run(
            words, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=left, check=False
        )
        if done.returncode:
            raise Failed(f"{words[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _digest(folder: Path) -> str:
    return (folder / "out" / "weights.sha256").read_text().split()[0]


def equal_weights(trial: Trial) -> Iterator[Row]:
    """A run under torchrun, one under grpo-run, and one whose rank is killed."""
    reference = trial.plain()
    folder, history = trial.launch()
    yield Row(what="weights as under torchrun", held=_digest(folder) == reference, figure="bitwise")
    saved = history.checkpoints
    size = (saved.size_bytes or 0) / GIB
    figure = f"{history.save_seconds or 0:.3f} s for {size:.2f} GiB"
    yield Row(what="last snapshot or checkpoint of that run", held=None, figure=figure)
    folder, history = trial.launch("--inject", f"kill@rank0:step{FAULT_STEP}")
    (fault,) = history.recoveries
    figure = f"next step {fault.recovery_seconds or 0:.2f} s after the fault"
    yield Row(what="weights after a SIGKILL", held=_digest(folder) == reference, figure=figure)


def hang(trial: Trial) -> Iterator[Row]:
    """A reward function that never returns."""
    _, history = trial.launch("--inject", f"hang@rank0:step{FAULT_STEP}")
    (fault,) = history.recoveries
    held = fault.cause == "hang" or "sleep" in fault.sentence
    yield Row(
        what="hang in a reward", held=held, figure=f"{fault.sentence} {fault.detection_seconds or 0:.1f} s"
    )


def out_of_memory(trial: Trial) -> Iterator[Row]:
    """A run whose memory is limited below its own peak continues with less."""
    if trial.cpu:
        return
    peak_file = trial.folder / "peak"
    trial.launch(script=(str(LIMITED), "0", str(peak_file)))
    peak = int(peak_file.read_text())
    limit = int(SHARE_OF_PEAK * peak)
    folder, history = trial.launch(script=(str(LIMITED), str(limit), str(peak_file)))
    causes = [fault.cause for fault in history.recoveries]
    after = int(peak_file.read_text())
    figure = f"peak {peak / GIB:.2f} GiB, limit {limit / GIB:.2f}, then {after / GIB:.2f}; {history.sentence}"
    yield Row(what="real out-of-memory fault", held="gpu_oom" in causes and history.completed, figure=figure)
    files = sorted(path.name for path in (folder / "run" / "incidents").glob("*/memory/*"))
    yield Row(what="memory in the incident", held=bool(files), figure=", ".join(files[:4]) or "none")


def prediction(trial: Trial) -> Iterator[Row]:
    """The smallest row of `memory_prediction.py`."""
    left = trial.ends_at - time.monotonic()
    if trial.cpu or left < 1:
        return
    words = [sys.executable, "-P", str(Path(__file__).with_name("memory_prediction.py")), "--device", "cuda"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=left, check=False)
        output = done.stdout
    except subprocess.TimeoutExpired as error:  # the rows that were printed by then are enough
        output = (error.stdout or b"").decode()
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > 4 and "%" in cells[4]:
            figure = f"measured {cells[2]} MiB, predicted {cells[3]}; worst phase {cells[4]}"
            yield Row(what=f"predicted memory, {cells[0]} {cells[1]}", held=None, figure=figure)


CASES: tuple[Callable[[Trial], Iterator[Row]], ...] = (equal_weights, hang, out_of_memory, prediction)


def rows(trial: Trial) -> Iterator[Row]:
    """Run all cases; a failed one is a row, and the others run nevertheless."""
    for case in CASES:
        try:
            yield from case(trial)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            yield Row(what=case.__name__.replace("_", " "), held=False, figure=str(error).splitlines()[0])
        except TimeoutError:
            yield Row(
                what=case.__name__.replace("_", " "), held=None, figure="not run: the nine minutes were over"
            )


def page(found: list[Row], facts: dict[str, object], device: str) -> str:
    """Return the table as Markdown."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = ["# On a GPU", "", f"{facts['date']}, {device}: {machine.sentence(facts)}", ""]
    lines += ["Written by `make gpu` (`benchmarks/gpu.py`).", "", "| what | held | figure |", "|---|---|---|"]
    lines += [f"| {row.what} | {words[row.held]} | {row.figure.replace('|', ' ')} |" for row in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything and write the table; returns 1 if a row did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--size", type=float, default=None, metavar="MILLIONS", help="parameters; default 200, on a CPU 0.1"
    )
    parser.add_argument("--output", type=Path, help="file of the table; printed by default")
    options = parser.parse_args()
    device = "CPU"
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("gpu: torch finds no GPU; --device cpu tries the program without one", file=sys.stderr)
            return NO_GPU
        device = torch.cuda.get_device_name(0)
    size = options.size or (200.0 if options.device == "cuda" else 0.1)
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="grpo-run-gpu-") as name:
        found = []
        for row in rows(Trial(Path(name), options.device, size)):
            print(f"{row.what}: {row.figure}", file=sys.stderr, flush=True)
            found.append(row)
    text = page(found, facts, device)
    if options.output is not None:
        options.output.write_text(text)
    else:
        print(text, end="")
    return int(any(row.held is False for row in found))


if __name__ == "__main__":
    sys.exit(main())
