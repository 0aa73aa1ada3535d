"""Train a few steps, and record in which order grpo-run's parts are called in one of them.

With `--form trainer` a GRPO trainer, with `--form loop` a loop of `grpo_run.trainers.loop`. Rank 0 writes
`calls.json`: the calls from the beginning of the third step to the beginning of the fourth. Recorded are the
methods of `StepEvents`, what they call, and what is called around a method of the trainer.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiny
import torch
from transformers import TrainerCallback

RECORDED_STEP = 3
WRAPPING = "/runtime/(features|rank/(hooks|rollouts))/"
EVENTS = os.path.join("runtime", "rank", "step", "events.py")


class Recorder:
    """Records calls while it is the interpreter's profile function."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []

    def start(self) -> None:
        """Record from now on."""
        sys.setprofile(self)

    def stop(self) -> None:
        """Record no further."""
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code, caller = frame.f_code, frame.f_back
        file, parameters = code.co_filename, code.co_varnames[: code.co_argcount]
        if file.endswith(EVENTS) and not code.co_name.startswith("_"):
            self._note("event", code, "")
        elif "original" in parameters and code.co_name[0] != "_" and re.search(WRAPPING, file):
            self._note("around", code, frame.f_locals["original"].__name__)
        elif (
            caller is not None
            and caller.f_code.co_filename.endswith(EVENTS)
            and "/runtime/" in file
            and not isinstance(
                getattr(type(frame.f_locals.get("self")), code.co_name, None), (property, type(None))
            )
        ):
            self._note("call", code, "")
        else:
            return
        phase = frame.f_locals.get("phase")
        if phase is not None:
            self.calls[-1]["phase"] = str(getattr(phase, "name", phase))

    def _note(self, kind: str, code: CodeType, method: str) -> None:
        text = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else ""
        parts = code.co_filename.split("/runtime/")
        self.calls.append(
            {
                "kind": kind,
                "name": code.co_qualname.replace(".<locals>", ""),
                "module": f"runtime/{parts[-1]}",
                "summary": " ".join(text.strip().partition("\n\n")[0].split()),
                "method": method,
            }
        )


class RecordOneStep(TrainerCallback):
    """The script's callbacks hear of a step before grpo-run's."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin and end the recording."""
        if state.global_step == RECORDED_STEP - 1:
            self.recorder.start()
        elif state.global_step == RECORDED_STEP:
            self.recorder.stop()


def train(arguments: Any, recorder: Recorder) -> None:
    """Train a GRPO trainer."""
    tiny.rollout_trainer(arguments, callbacks=[RecordOneStep(recorder)]).train()


def iterate(arguments: Any, recorder: Recorder) -> None:
    """Train in a loop."""
    from grpo_run.trainers import loop

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    steps = loop.steps(arguments.max_steps, state=state, output_dir=arguments.output_dir)
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        if step == RECORDED_STEP - 2:  # the next step begins when it is asked for
            recorder.start()
        elif step == RECORDED_STEP - 1:
            recorder.stop()


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--form", choices=["trainer", "loop"], default="trainer")
    arguments = parser.parse_args()
    recorder = Recorder()
    (train if arguments.form == "trainer" else iterate)(arguments, recorder)
    if os.environ.get("RANK", "0") == "0":
        Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(arguments.output_dir) / "calls.json").write_text(json.dumps(recorder.calls))


if __name__ == "__main__":
    main()
