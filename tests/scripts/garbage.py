"""An SFT script in which one rank leaves memory in reference cycles, and that records its own garbage
collections.

Each step of `--garbage-rank` leaves `--garbage-mib` in a cycle of the oldest generation, which Python hardly
ever collects by itself. Each training step makes enough small cycles for several automatic collections.
Writes `collections-rank{r}.json`: the steps of full collections, the automatic collections inside and outside
training steps, and what `gc` is set to in a process forked inside a training step and at the end.
With `--own-choice` the script sets thresholds itself before it trains.
"""

from __future__ import annotations

import gc
import json
import math
import os
from typing import Any

import sft
import tiny
from transformers import TrainerCallback

from grpo_run.runtime.rank.memory import garbage_collection

CYCLES = 3000


class Garbage(TrainerCallback):
    """Leaves a block of memory in a cycle after each step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step that begins."""
        self.step = state.global_step + 1
        if self._size:
            cycle: list[Any] = [b"x" * self._size]
            cycle.append(cycle)
            gc.collect(1)  # the cycle is alive, and grows old


class Recorder:
    """Counts collections."""

    def __init__(self, garbage: Garbage) -> None:
        self._garbage = garbage
        self.inside = False
        self.record: dict[str, Any] = {"full": [], "inside": 0, "outside": 0}

    def __call__(self, moment: str, info: dict[str, int]) -> None:
        """A collection begins or ends."""
        if moment == "stop":
            return
        if info["generation"] == 2:
            self.record["full"].append(self._garbage.step)
        self.record["inside" if self.inside else "outside"] += 1


def threshold_in_child() -> int:
    """Return the threshold of the youngest generation in a process that is forked from this one now."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, str(gc.get_threshold()[0]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(here, 20))


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--garbage-rank", type=int, default=-1)
    parser.add_argument("--garbage-mib", type=int, default=0)
    parser.add_argument("--own-choice", action="store_true")
    arguments = parser.parse_args()
    tiny.use_test_shims()
    garbage_collection.LONGEST_SECONDS = math.inf  # on a busy machine a step lasts longer than a second

    rank = int(os.environ["RANK"])
    garbage = Garbage(arguments.garbage_mib * 2**20 if rank == arguments.garbage_rank else 0)
    recorder = Recorder(garbage)
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer), arguments.seed)
    trainer = sft.trainer_for(arguments, arguments.output_dir, tokenizer, model)
    trainer.add_callback(garbage)
    training_step = trainer.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        recorder.inside = True
        if garbage.step == 2:
            recorder.record["in_child"] = threshold_in_child()
        for _ in range(CYCLES):
            small: list[Any] = []
            small.append(small)
        try:
            return training_step(*args, **kwargs)
        finally:
            recorder.inside = False

    trainer.training_step = step
    if arguments.own_choice:
        gc.set_threshold(500, 9, 100_000)  # no automatic full collection
    gc.callbacks.append(recorder)
    tiny.train(trainer, arguments)
    gc.callbacks.remove(recorder)
    recorder.record |= {"enabled": gc.isenabled(), "threshold": gc.get_threshold()}
    arguments.output_dir.joinpath(f"collections-rank{rank}.json").write_text(json.dumps(recorder.record))
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
