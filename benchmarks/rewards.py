"""Measure what a call of a reward function costs in a worker, beside the same call in the rank.

Both calls are made in turn in one process, in the order A B, B A, and so on, with the arguments that TRL
passes. The function reads each completion once, so that its own time is small. Each pair gives one
difference; the table shows the median with its interval, and its share of a step of one second.
"""

from __future__ import annotations

import random
import string
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: F401 - as in a rank
from parts import machine
from parts.interval import Interval, median_interval
from transformers import TrainerState

from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.rank.rewards import host
from grpo_run.runtime.rank.rewards._failures import FailureLog
from grpo_run.runtime.rank.rewards._service import MovedFunction, RewardService

WARM_CALLS = 20
SHAPES = ((8, 512), (64, 1024))
"""Completions of a call, and tokens of each."""
STEP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One shape: medians in seconds, and what a worker adds to a call."""

    completions: int
    tokens: int
    in_rank_seconds: float
    in_worker_seconds: float
    added_seconds: Interval


def digits(completions: list[str], **columns: Any) -> list[float]:
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / len(text) for text in completions]


def arguments(completions: int, tokens: int) -> dict[str, Any]:
    """Return the keyword arguments of one call."""
    letters = string.ascii_lowercase + string.digits + " "
    return {
        "prompts": ["".join(random.choices(letters, k=200)) for _ in range(completions)],
        "completions": ["".join(random.choices(letters, k=4 * tokens)) for _ in range(completions)],
        "completion_ids": [random.choices(range(150_000), k=tokens) for _ in range(completions)],
        "answer": ["42"] * completions,
        "trainer_state": TrainerState(global_step=7),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def measure(service: RewardService, moved: MovedFunction, shape: tuple[int, int], pairs: int) -> Row:
    """Time calls in turn."""
    given = arguments(*shape)
    taken: dict[str, list[float]] = {"rank": [], "worker": []}
    for number in range(WARM_CALLS + pairs):
        for place in ("rank", "worker") if number % 2 else ("worker", "rank"):
            began = time.perf_counter()
            values = digits(**given) if place == "rank" else service.score(moved, given)
            if number >= WARM_CALLS:
                taken[place].append(time.perf_counter() - began)
            assert values is not None
            assert len(values) == shape[0]
    differences = [there - here for here, there in zip(taken["rank"], taken["worker"], strict=True)]
    return Row(
        completions=shape[0],
        tokens=shape[1],
        in_rank_seconds=median_interval(taken["rank"]).median,
        in_worker_seconds=median_interval(taken["worker"]).median,
        added_seconds=median_interval(differences),
    )


def table(rows: list[Row], pairs: int) -> Table:
    """Return the table to print."""
    rendered = Table(title=f"One call of a reward function, {pairs} pairs per row")
    for column in (
        "completions",
        "tokens",
        "in the rank",
        "in a worker",
        "added",
        "95 % interval",
        "of a step of 1 s",
    ):
        rendered.add_column(column, justify="right")
    for row in rows:
        added = row.added_seconds
        between = (
            f"{added.low * 1000:.2f} to {added.high * 1000:.2f} ms"
            if added.low is not None and added.high is not None
            else "6 pairs required"
        )
        rendered.add_row(
            str(row.completions),
            str(row.tokens),
            f"{row.in_rank_seconds * 1000:.2f} ms",
            f"{row.in_worker_seconds * 1000:.2f} ms",
            f"{added.median * 1000:.2f} ms",
            between,
            f"{added.median / STEP_SECONDS:.2%}",
        )
    return rendered


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=500, help="pairs per row; default 500")
    options = parser.parse_args()
    console = Console()
    facts = machine.facts()
    config = RunConfig(
        run_id="rewards", run_directory=Path(), target="rewards.py", module=False, arguments=(), command=()
    )
    service = RewardService(
        host.start(),
        config,
        earlier=None,
        workers=1,
        memory_limit_bytes=2**32,
        log=FailureLog(lambda event: None, console.print),
        warn=console.print,
        on_waiting=lambda: None,
    )
    try:
        (moved,) = service.add([(digits, "digits")])
        rows = [measure(service, moved, shape, options.pairs) for shape in SHAPES]
    finally:
        service.close()
    console.print(table(rows, options.pairs))
    result = {
        "benchmark": "rewards",
        "machine": facts,
        "settings": {"pairs": options.pairs, "step_seconds": STEP_SECONDS},
        "summary": [asdict(row) for row in rows],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
