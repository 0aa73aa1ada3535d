"""A script that fails in the way that its first argument names, at its start, in training or after it.

Only the ways in and after training import torch.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def forever() -> None:
    """Call itself."""
    forever()


def open_files() -> None:
    """Open more files than the limit permits."""
    limit = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held = [open(os.devnull) for _ in range(100)]  # noqa: SIM115
    print(len(held))


def raised(error: BaseException) -> Callable[[], None]:
    """Return a function that raises an exception."""

    def fail() -> None:
        raise error

    return fail


WAYS: dict[str, Callable[[], Any]] = {
    "a package is missing": lambda: __import__("no_such_package"),
    "an exception": raised(ValueError("no rewards in /data")),
    'sys.exit("text")': lambda: sys.exit("no data in /data"),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(1)": lambda: os._exit(1),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "a segmentation fault": lambda: ctypes.string_at(0),
    "abort()": os.abort,
    "no memory of the host": raised(MemoryError("cannot allocate 4 GiB")),
    "endless recursion": forever,
    "a directory that cannot be written": lambda: os.makedirs("/proc/nope/out"),
    "too many open files": open_files,
    "KeyboardInterrupt in the script": raised(KeyboardInterrupt()),
    "wrong arguments": lambda: __import__("argparse").ArgumentParser().parse_args(["--lrr", "1"]),
}


def train(fail: Callable[[], Any] | None, *, workers: int = 0) -> None:
    """Train a few steps; `fail` is called in a callback at the end of the third."""
    import tiny
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if fail is not None and state.global_step == 3:
                fail()

    class Data(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if workers and index > 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    arguments = tiny.argument_parser("").parse_args(["--output-dir", "out", "--max-steps", "5"])
    tokenizer = tiny.tokenizer()
    trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), 1),
        args=SFTConfig(**{**tiny.settings(arguments), "dataloader_num_workers": workers}, max_length=32),
        train_dataset=tiny.texts(40),
        processing_class=tokenizer,
        callbacks=[Fails()],
    )
    if workers:
        trainer.train_dataset = Data(trainer.train_dataset)
    trainer.train()


def main() -> None:
    when, way = sys.argv[1:3]
    if when == "in training":
        train(WAYS.get(way), workers=int(way == "a data loader's worker is killed"))
        return
    if when == "after training":
        train(None)
    WAYS[way]()


if __name__ == "__main__":
    main()
