"""A training loop with accelerate that saves by `Accelerator.save_state` and resumes by itself with
`load_state`.

Each rank appends a line per step to `rank{R}.jsonl`. Writes `weights.sha256` into its output directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

EPOCH = 6
"""Steps of an epoch; each has an order of its own."""


def newest(folder: Path) -> Path | None:
    """Return the newest state that was marked as complete."""
    marked = [path for path in folder.glob("step_*") if (path / "complete").exists()]
    return max(marked, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def fsdp2() -> FullyShardedDataParallelPlugin:
    """Let accelerate shard on CPU, and return the plugin."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shims"))
    import fsdp_on_cpu

    fsdp_on_cpu.install()
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument(
        "--kill-at", type=int, nargs="*", default=(), help="a rank kills itself at each of these steps, once"
    )
    parser.add_argument("--fsdp2", action="store_true")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp2() if arguments.fsdp2 else None)
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(isinstance(one, DTensor) == arguments.fsdp2 for one in model.parameters())
    folder = arguments.output_dir
    folder.mkdir(exist_ok=True)
    begin = 0
    found = newest(folder)
    if found is not None:
        accelerator.load_state(str(found))
        begin = int(found.name.removeprefix("step_"))
    print(f"begins at {begin}", flush=True)
    for step in range(begin + 1, arguments.steps + 1):
        chosen = accelerator.process_index == step % accelerator.num_processes
        if step in arguments.kill_at and chosen and not (folder / f"killed-{step}").exists():
            (folder / f"killed-{step}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        epoch, position = divmod(step - 1, EPOCH)
        order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(epoch))
        batch = torch.full((2, 4), float(order[position] + 1 + accelerator.process_index))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with open(folder / f"rank{accelerator.process_index}.jsonl", "a") as file:
            line = {"step": step, "loss": loss.item(), "random": torch.rand(()).item()}
            file.write(json.dumps(line) + "\n")
        if step % arguments.save_every == 0:
            path = folder / f"step_{step}"
            accelerator.save_state(str(path))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (path / "complete").touch()
            accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        data = torch.cat([value.flatten() for value in state.values()]).numpy().tobytes()
        (folder / "weights.sha256").write_text(hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main()
