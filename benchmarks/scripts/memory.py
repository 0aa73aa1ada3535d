"""The TRL script of the memory benchmark: a tiny GRPO training that times its steps under `grpo-run launch`.

With `--switch`, what is measured of the memory of phases is switched off and on in blocks of so many steps:
blocks of both kinds alternate in one process, so that a drift of the machine affects both alike. With
`--garbage-mib`, each step of rank 0 leaves so much in a reference cycle of the oldest generation. Rank 0
prints the results as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import grpo
import tiny
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_run.runtime.rank.memory.phases import ResidentMemory
from grpo_run.runtime.rank.session import current

MARK = "RESULTS "
SKIPPED_STEPS = 5


class Steps(TrainerCallback):
    """Times the steps, and does between them what the arguments ask for."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._session = current()
        self._host = ResidentMemory()
        self._own: Any = None
        self._garbage = arguments.garbage_mib * 2**20 if os.environ["RANK"] == "0" else 0
        self.ends: list[float] = []
        self.measured: list[bool] = []
        self.highest = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._garbage:
            cycle: list[Any] = [b"x" * self._garbage]
            cycle.append(cycle)
            gc.collect(1)  # the cycle is alive, and grows old

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.highest = max(self.highest, self._host.read().anonymous)
        step, every = state.global_step, self._arguments.collect_every
        if every and step % every == 0:
            gc.collect()
        if self._arguments.switch and self._session is not None:
            on = step // self._arguments.switch % 2 == 1
            self.measured.append(on)
            self._switch(on)

    def _switch(self, on: bool) -> None:
        """Measure in the next step, or do nothing for it at all."""
        session, accounting = self._session, self._session.accounting
        if self._own is None:
            self._own = session.slot.on_change, accounting.step_ended
        session.slot.on_change, accounting.step_ended = self._own if on else (None, lambda: None)

    def results(self) -> dict[str, Any]:
        """What this rank has seen."""
        assert self._session is not None
        slot, totals = self._session.slot, self._session.slot.memory_area.totals
        times = [later - earlier for earlier, later in zip(self.ends, self.ends[1:], strict=False)]
        return {
            "steps": times[SKIPPED_STEPS:],
            "measured": self.measured[SKIPPED_STEPS:],
            "own_seconds": totals.spent_ns / 1e9,
            "readings": totals.readings,
            "highest_anonymous_bytes": self.highest,
            "cleanup_runs": slot.cleanup_runs,
            "cleanup_seconds": slot.cleanup_seconds,
            "freed_bytes": totals.freed_bytes,
        }


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    tiny.rollout_arguments(parser)
    parser.add_argument("--compute-units", type=int, default=0)
    parser.add_argument("--switch", type=int, default=0, metavar="STEPS")
    parser.add_argument("--garbage-mib", type=int, default=0)
    parser.add_argument("--collect-every", type=int, default=0, metavar="STEPS", help="collect in the script")
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    steps = Steps(arguments)
    trainer = GRPOTrainer(
        model=grpo.policy(len(tokenizer), 0.0, arguments.seed),
        reward_funcs=grpo.rewards_with_work(arguments.step_seconds, arguments.compute_units),
        args=GRPOConfig(
            **{**tiny.settings(arguments), "save_strategy": "no"}, **tiny.rollout_settings(arguments)
        ),
        train_dataset=tiny.prompts(tiny.prompts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    tiny.train(trainer, arguments)
    if os.environ["RANK"] == "0":
        Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
        print(MARK + json.dumps(steps.results()), flush=True)


if __name__ == "__main__":
    main()
