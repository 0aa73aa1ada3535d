"""A small SFT script that ends in the way that `--do MOMENT=ACTION` says, as often as it is given.

    moments   start; step-N, at the end of step N and before its save; saved-N, one step later, when the
              checkpoint of step N is on disk; end, after `train()`
    actions   fill:DIR         take all space of a file system
              room:DIR         give it back
              read-only:DIR    mount it so
              quota:DIR        use up the quota of `tests/shims/quota.c`
              save:DIR         `trainer.save_model`
              raise, kill, oom, thread (one that never ends)

`once-ACTION` does it in the first attempt only. With a file `quiet` in the working
directory, only room is made and models are saved.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

BALLAST = "ballast"


class Acts(TrainerCallback):
    """Does what the command line asks for."""

    trainer: Any = None

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = [one.partition("=")[::2] for one in wanted]

    def do(self, moment: str) -> None:
        for at, action in self.wanted:
            if at == moment:
                self._act(action)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.do(f"step-{state.global_step}")
        before = state.global_step - 1
        if any(moment == f"saved-{before}" for moment, _ in self.wanted):
            deadline = time.monotonic() + 60.0
            while not (Path(args.output_dir) / f"checkpoint-{before}").is_dir():
                if time.monotonic() > deadline:
                    raise SystemExit(f"checkpoint-{before} is not on disk")
                time.sleep(0.01)
            self.do(f"saved-{before}")

    def _act(self, action: str) -> None:
        if action.startswith("once-"):
            marker = Path(f"{action.partition(':')[0]}.done")
            if marker.exists():
                return
            marker.touch()
        name, _, place = action.removeprefix("once-").partition(":")
        if Path("quiet").exists() and name not in ("room", "save"):
            return
        if name == "fill":
            status = os.statvfs(place)
            if free := status.f_bavail * status.f_frsize:
                with open(Path(place) / BALLAST, "w+b") as file:
                    os.posix_fallocate(file.fileno(), 0, free)
        elif name == "room":
            (Path(place) / BALLAST).unlink()
        elif name == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        elif name == "quota":
            (Path(place) / ".quota").touch()
        elif name == "raise":
            raise ValueError("a mistake of the script")
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        elif name == "thread":
            threading.Thread(target=threading.Event().wait).start()
        elif name == "save":
            self.trainer.save_model(place)
        else:
            raise SystemExit(f"no action {action}")


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--do", action="append", default=[], metavar="MOMENT=ACTION")
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    acts = Acts(arguments.do)
    acts.do("start")
    acts.trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        args=SFTConfig(**tiny.settings(arguments), max_length=32),
        train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
        processing_class=tokenizer,
        callbacks=[*tiny.callbacks(arguments), tiny.SleepAtStep(arguments.step_seconds), acts],
    )
    tiny.train(acts.trainer, arguments)
    acts.do("end")


if __name__ == "__main__":
    main()
