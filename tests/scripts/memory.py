"""The plain SFT script, of which a rank takes memory of the host: all there is at one step, some in every
step, or page cache.

`--ballast-mib` makes checkpoints larger by a parameter that is not trained.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import sft
import tiny
import torch
from transformers import TrainerCallback

PAGE_BYTES = 4096
taken: list[bytearray] = []
"""What the rank holds and never frees."""


def take(size_bytes: int) -> None:
    """Take memory, and touch every page of it."""
    block = bytearray(size_bytes)
    block[::PAGE_BYTES] = b"x" * len(block[::PAGE_BYTES])
    taken.append(block)


class TakeMemory(TrainerCallback):
    """Takes memory at the beginning of steps."""

    def __init__(self, arguments: Any) -> None:
        self.all_at, self.leak, self.steady = arguments.all_at, arguments.leak_mib, arguments.steady_mib
        self.mapped = arguments.map_file
        self.marker = Path(arguments.output_dir) / "taken"
        self.rank = int(os.environ.get("RANK", "0"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the steady part."""
        if self.rank == 1 and self.steady:
            take(self.steady << 20)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take all there is once in the run, or a little more in every step."""
        if self.rank != 1:
            return
        if self.mapped is not None:
            with (
                open(self.mapped, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                sum(data[place] for place in range(0, len(data), PAGE_BYTES))
        if self.leak:
            take(self.leak << 20)
        if self.all_at == state.global_step + 1 and not self.marker.exists():
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            self.marker.touch()
            while True:
                take(8 << 20)


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--all-at", type=int, default=0, help="rank 1 takes all memory in this step, once")
    parser.add_argument("--leak-mib", type=int, default=0, help="rank 1 takes as much more in every step")
    parser.add_argument("--steady-mib", type=int, default=0, help="rank 1 takes as much at the start")
    parser.add_argument("--map-file", help="rank 1 reads this file through a mapping in every step")
    parser.add_argument("--ballast-mib", type=int, default=0, help="size of a parameter that is not trained")
    arguments = parser.parse_args()
    tiny.use_test_shims()
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer), arguments.seed)
    if arguments.ballast_mib:
        model.ballast = torch.nn.Parameter(torch.zeros(arguments.ballast_mib << 18), requires_grad=False)
    trainer = sft.trainer_for(arguments, arguments.output_dir, tokenizer, model)
    trainer.add_callback(TakeMemory(arguments))
    tiny.train(trainer, arguments)
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
