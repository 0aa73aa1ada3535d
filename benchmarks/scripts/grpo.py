"""The TRL script of the recovery and overhead benchmarks: a tiny GRPO training with a step log.

Started on two ranks by the launcher that is measured. It does not use `grpo_run`; its own callback records
the times, so they are measured in the same way under every launcher. Does not inject faults.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

import tiny
import work
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepLog(TrainerCallback):
    """Append monotonic seconds, step and process ID at the end of each step, in a single write.

    Args:
        path: base path of the log; `.{rank}` is appended.
    """

    def __init__(self, path: Path) -> None:
        rank = os.environ.get("RANK", "0")
        self._file = open(f"{path}.{rank}", "ab", buffering=0)  # noqa: SIM115 - stays open until the process exits

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._file.write(f"{time.monotonic():.6f} {state.global_step} {os.getpid()}\n".encode())


def rewards_with_work(step_seconds: float, compute_units: int) -> Any:
    """Return the tests' reward function with a fixed amount of sleep and computing.

    A step that waited until a deadline instead would hide the overhead of a supervisor.
    """
    inner = tiny.rewards(step_seconds)

    def overlap(prompts: list[str], completions: list[str], **keywords: Any) -> Any:
        work.compute(compute_units)
        return inner(prompts, completions, **keywords)

    return overlap


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument(
        "--step-log", type=Path, required=True, help="file to append to at the end of each step"
    )
    parser.add_argument(
        "--compute-units", type=int, default=0, help="units of computing per reward call; see work.py"
    )
    parser.add_argument("--no-save", action="store_true", help="write no checkpoint")
    arguments = parser.parse_args()
    tiny.check_rollout_boundaries(arguments)

    settings = tiny.settings(arguments)
    if arguments.no_save:
        settings["save_strategy"] = "no"
    tokenizer = tiny.tokenizer()
    trainer = GRPOTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        reward_funcs=rewards_with_work(arguments.step_seconds, arguments.compute_units),
        args=GRPOConfig(**settings, **tiny.rollout_settings(arguments)),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[StepLog(arguments.step_log)],
    )
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
