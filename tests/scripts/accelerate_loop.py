"""A training loop with accelerate that saves by `Accelerator.save_state` and resumes by itself with `load_state`.

Writes `weights.sha256` into its output directory. `--save-on main` saves on rank 0 only, as some scripts do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator


def newest(folder: Path) -> Path | None:
    """Return the newest state that was marked as complete."""
    marked = [path for path in folder.glob("step_*") if (path / "complete").exists()]
    return max(marked, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--save-on", choices=("all", "main"), default="all")
    parser.add_argument(
        "--save-seconds", type=float, default=0.0, help="how long rank 0 takes longer to save"
    )
    parser.add_argument("--kill-at", type=int, help="the last rank kills itself at this step, once")
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    folder = arguments.output_dir
    folder.mkdir(exist_ok=True)
    begin = 0
    found = newest(folder)
    if found is not None:
        accelerator.load_state(str(found))
        begin = int(found.name.removeprefix("step_"))
    print(f"begins at {begin}", flush=True)

    def slow(models: object, weights: object, output_dir: str) -> None:
        if accelerator.is_main_process:
            time.sleep(arguments.save_seconds)

    accelerator.register_save_state_pre_hook(slow)
    for step in range(begin + 1, arguments.steps + 1):
        time.sleep(arguments.seconds)
        last = accelerator.process_index == accelerator.num_processes - 1
        if step == arguments.kill_at and last and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.full((2, 4), float(step + accelerator.process_index))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % arguments.save_every == 0:
            path = folder / f"step_{step}"
            if arguments.save_on == "all" or accelerator.is_main_process:
                accelerator.save_state(str(path))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (path / "complete").touch()
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(model).state_dict()
        data = torch.cat([value.flatten() for value in state.values()]).numpy().tobytes()
        (folder / "weights.sha256").write_text(hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main()
