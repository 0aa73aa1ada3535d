"""Hand-written loops that are odd but legitimate, one `--kind` at a time, on one rank or with DDP on several.

Writes `weights.sha256` at the end: of the model, of what the steps have logged and of the generators' next numbers. Run it
with `torchrun` or `grpo-run launch`.
"""

from __future__ import annotations

import argparse
import collections
import copy
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from grpo_run.trainers import consensus, loop

STEPS, WIDTH = 7, 8


class Training:
    """A model, its optimizer, and what the steps have logged."""

    def __init__(self, output_dir: Path, *, ddp: bool) -> None:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        self.ddp = ddp
        self.folder = output_dir
        self.plain = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, WIDTH)
        )
        self.model: Any = torch.nn.parallel.DistributedDataParallel(self.plain) if ddp else self.plain
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.logged: list[Any] = []
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "logged": self.logged}
        torch.manual_seed(10 + int(os.environ.get("RANK", "0")))

    def steps(self, n: int = STEPS, *, name: str = "loop", **settings: Any) -> Any:
        """Begin a loop."""
        return loop.steps(n, state=self.state, output_dir=self.folder / name, **settings)

    def loss(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of a random batch."""
        batch = torch.randn(4, WIDTH) if batch is None else batch
        return (self.model(batch) - batch.flip(1)).square().mean()

    def step(self, batch: torch.Tensor | None = None) -> None:
        """A step of the optimizer."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.logged.append(loss.item())


def progress_bar(t: Training) -> None:
    """A generator around the steps, and one around that."""

    def bar(steps: Any) -> Iterator[int]:
        for step in steps:  # noqa: UP028 - the loop is the generator's own
            yield step

    for step in itertools.islice(bar(t.steps()), None):
        t.step()
        t.logged.append(step)


def caught(t: Training) -> None:
    """Exceptions in the body, `continue`, and an inner loop that is left by `break`."""
    for step in t.steps():
        try:
            if step % 3 == 1:
                raise ValueError(step)
            t.step()
        except ValueError:
            continue
        for inner in range(5):
            if inner == 2:
                break
        else:
            raise AssertionError


def two_loops(t: Training) -> None:
    """One loop after the other, with a step of the optimizer between them."""
    for _ in t.steps(4, name="first"):
        t.step()
    t.step()
    for _ in t.steps(4, name="second"):
        t.step()


def called_twice(t: Training) -> None:
    """The same lines, for two models."""

    def train(name: str) -> None:
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in loop.steps(4, state={"m": model, "o": optimizer}, output_dir=t.folder / name):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
        t.logged.append(model.weight.sum().item())

    train("first")
    train("second")
    t.step()


def workers(t: Training) -> None:
    """A shuffled data loader with workers, whose collation draws no numbers."""
    data = TensorDataset(torch.arange(13.0)[:, None].repeat(1, WIDTH))
    loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=2)
    for _, (batch,) in t.steps(data=loader):
        t.step(batch)


class Stream(IterableDataset[torch.Tensor]):
    """A stream of numbered samples, another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(range(7))
        random.Random(self.epoch).shuffle(numbers)
        yield from (torch.full((WIDTH,), float(number)) for number in numbers)


def stream(t: Training) -> None:
    """An iterable data set."""
    for _, batch in t.steps(data=DataLoader(Stream(), batch_size=2)):
        t.step(batch)


def batches(t: Training) -> None:
    """A batch sampler, a collation that draws numbers, and a generator of the loader's own."""
    data = torch.arange(11.0)[:, None].repeat(1, WIDTH)
    sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(5)), 3, drop_last=True)  # type: ignore[arg-type]

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items) + torch.rand(1) + random.random()

    for _, batch in t.steps(data=DataLoader(data, batch_sampler=sampler, collate_fn=collate)):  # type: ignore[arg-type]
        t.step(batch)


def accumulated(t: Training) -> None:
    """Several backward passes in one step, without synchronization but for the last."""
    for _ in t.steps():
        t.optimizer.zero_grad(set_to_none=False)
        for micro in range(3):
            if t.ddp and micro < 2:
                with t.model.no_sync():
                    (t.loss() / 3).backward()
            else:
                (t.loss() / 3).backward()
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.optimizer.step()
        t.logged.append(float(norm))


def schedulers(t: Training) -> None:
    """Schedulers of several kinds, one of them with a function."""
    warm = torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda step: (step + 1) / 3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, STEPS)
    sequence = torch.optim.lr_scheduler.SequentialLR(t.optimizer, [warm, cosine], [3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=1)
    t.state |= {"sequence": sequence, "plateau": plateau}
    for _ in t.steps():
        t.step()
        sequence.step()
        plateau.step(t.logged[-1])
        t.logged.append(t.optimizer.param_groups[0]["lr"])


def averaged(t: Training) -> None:
    """An average of the weights, and a copy that follows."""
    ema = torch.optim.swa_utils.AveragedModel(
        t.plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    target = copy.deepcopy(t.plain).requires_grad_(False)
    t.state |= {"ema": ema, "target": target}
    for _ in t.steps():
        t.step()
        ema.update_parameters(t.plain)
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), t.plain.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        t.logged.append([float(ema(torch.ones(1, WIDTH)).sum()), float(target(torch.ones(1, WIDTH)).sum())])


def compiled(t: Training) -> None:
    """A compiled model in the state, beside the one that it was compiled from."""
    t.model = torch.compile(t.model, backend="aot_eager")
    t.state["model"] = t.model
    for _ in t.steps():
        t.step()


def compiled_in_place(t: Training) -> None:
    """A model that compiles itself."""
    t.plain.compile(backend="aot_eager")
    for _ in t.steps():
        t.step()


def scaled(t: Training) -> None:
    """Mixed precision with a gradient scaler that skips steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    t.state["scaler"] = scaler
    for step in t.steps():
        t.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = t.loss()
        scaled = scaler.scale(loss * (float("inf") if step in (0, 4) else 1.0))
        scaled.backward()
        scaler.unscale_(t.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
        scaler.step(t.optimizer)
        scaler.update()
        loop.log({"loss": loss, "grad_norm": norm})
        t.logged.append([loss.item(), scaler.get_scale()])


def no_steps(t: Training) -> None:
    """A loop of no steps, before one with some."""
    for _ in t.steps(0, name="none"):
        raise AssertionError
    for _ in t.steps():
        t.step()


def shared(t: Training) -> None:
    """Objects that occur twice: a model, a part of it, tied weights, and one list under two names."""
    t.plain[3].weight = torch.nn.Parameter(t.plain[0].weight.T.clone())
    t.plain[0].register_parameter("also", t.plain[3].weight)
    t.optimizer = torch.optim.AdamW(t.plain.parameters(), lr=0.05)
    t.model = t.plain
    t.state |= {
        "model": t.plain, "again": t.plain, "head": t.plain[3], "optimizer": t.optimizer, "copy of logged": t.logged,
        "nested": {"logged": t.logged},
    }  # fmt: skip
    for _ in t.steps():
        t.step()


def agreed(t: Training) -> None:
    """The ranks decide together in the reward."""

    def reward(step: int) -> float:
        rounds = 0
        for _ in consensus.while_any(lambda: rounds < 2 + (step + int(os.environ.get("RANK", "0"))) % 3):  # noqa: B023
            rounds += 1
        return float(consensus.any(rounds > 3)) + rounds

    for step in t.steps():
        t.logged.append(reward(step))
        t.step()
        if consensus.all(step == STEPS - 2):
            t.logged.append("last but one")


def adversaries(t: Training) -> None:
    """Two optimizers in turn, one of them with a closure, and a group of parameters that is added later."""
    other = torch.nn.Linear(WIDTH, 1)
    lbfgs = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3)
    t.state |= {"other": other, "lbfgs": lbfgs}
    for step in t.steps():
        if step % 2:
            t.step()
            continue
        batch = torch.randn(4, WIDTH)

        def closure(batch: torch.Tensor = batch) -> Any:
            lbfgs.zero_grad()
            loss = other(batch).square().mean()
            loss.backward()
            return loss

        t.logged.append(float(lbfgs.step(closure)))


def values(t: Training) -> None:
    """Values of many types, some of which change their type."""
    t.state |= {
        "none": None, "tuple": (1, (2.5, "x")), "counter": collections.Counter("ab"), "queue": collections.deque([1], maxlen=3),
        "table": collections.defaultdict(list), "array": np.arange(4.0), "scalar": np.float32(1.5), "ordered": collections.OrderedDict(a=1),
        "tensor": torch.zeros(3), "keys": {1: "one", (2, 3): "two"}, "bytes": b"\x00\xff", "set": {1, 2}, "nan": float("nan"),
        "big": 2**80, "complex": 1 + 2j, "frozen": frozenset({3}), "rng": random.Random(4), "numpy": np.random.default_rng(6),
        "torch": torch.Generator().manual_seed(8), "half": torch.ones(2).half(),
    }  # fmt: skip
    s = t.state
    for step in t.steps():
        t.step()
        s["none"] = step if s["none"] is None else None
        s["tuple"] = (step, s["tuple"][1])
        s["counter"].update("abc")
        s["queue"].append(step)
        s["table"][step % 2].append(step)
        s["array"] = s["array"] * 2
        s["tensor"] += 1
        s["keys"][2, 3] += "!"
        s["set"].add(step)
        s["big"] += 1
        s["complex"] *= 1j
        s["frozen"] |= {step}
        t.logged.append(
            [s["rng"].random(), float(s["numpy"].random()), float(torch.rand((), generator=s["torch"]))]
        )
    t.logged.append(
        repr(
            {
                key: value
                for key, value in s.items()
                if key not in ("model", "optimizer", "rng", "numpy", "torch", "logged")
            }
        )
    )


def referred(t: Training) -> None:
    """Values that variables of the script refer to, at any depth, and two that begin as one."""
    recent: Any = collections.deque(maxlen=3)
    baseline, rewards = np.zeros(2), [0.0]
    t.state |= {
        "recent": recent,
        "stats": {"baseline": baseline, "rewards": rewards},
        "now": rewards,
        "best": rewards,
    }
    for step in t.steps():
        t.step()
        recent.append(step)
        baseline += step
        rewards.append(t.logged[-1])
        t.state["now"] = list(rewards)
        if t.logged[-1] <= min(t.logged):
            t.state["best"] = list(rewards)
    t.logged.append(repr([recent, baseline, rewards, t.state["now"], t.state["best"]]))  # type: ignore[arg-type]


def changing(t: Training) -> None:
    """Layers are frozen and thawed, evaluation in between, and gradients that are kept for the next step."""
    for step in t.steps():
        t.plain[0].requires_grad_(step % 3 != 1 or t.ddp)
        t.step()
        t.model.eval()
        with torch.inference_mode():
            t.logged.append(t.loss().item())
        t.model.train()
        if t.plain[0].weight.grad is not None and not t.ddp:
            t.plain[0].weight.grad = None


def in_functions(t: Training) -> None:
    """The loop is an argument; the body is a nested function with variables of its own."""
    total = 0.0

    def body(step: int) -> None:
        nonlocal total
        t.step()
        total = t.state["total"] = t.state["total"] + step

    def run(steps: Any) -> None:
        nonlocal total
        total = t.state["total"]
        any(body(step) for step in steps)

    t.state["total"] = 0.0
    run(t.steps())
    t.logged.append(total)


def listed(t: Training) -> None:
    """`next` by hand, and a comprehension for the rest."""
    steps = t.steps()
    while (step := next(steps, None)) is not None and step < 2:
        t.step()
    if step is not None:
        t.step()
    [t.step() for _ in steps]


def committed(t: Training) -> None:
    """A loop over `while` that decides by what it has logged, and keeps going after an exception."""
    with loop.begin(state=t.state, output_dir=t.folder / "loop") as run:
        while len(t.logged) < STEPS:
            try:
                t.step()
                int("x" if run.step == 2 else "1")
            except ValueError:
                t.logged[-1] = 0.0
            run.commit()


def saved(t: Training) -> None:
    """The script also saves by itself, and reads what it has saved."""
    for step in t.steps(save_every=2, save_total_limit=1):
        t.step()
        if step % 2 == 0 and os.environ.get("RANK", "0") == "0":
            torch.save(t.plain.state_dict(), t.folder / "own.pt")
            t.logged.append(float(sum(value.sum() for value in torch.load(t.folder / "own.pt").values())))


KINDS: dict[str, Callable[[Training], None]] = {
    function.__name__: function
    for function in (
        progress_bar, caught, two_loops, called_twice, workers, stream, batches, accumulated, schedulers, averaged, compiled,
        compiled_in_place, scaled, no_steps, shared, agreed, adversaries, values, referred, changing, in_functions, listed, committed, saved,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    training = Training(arguments.output_dir, ddp=ranks > 1)
    KINDS[arguments.kind](training)
    digest = hashlib.sha256()
    for name, value in training.plain.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    ends = (training.logged, torch.rand(2).tolist(), random.random(), float(np.random.rand()))
    digest.update(repr(ends).encode())
    (arguments.output_dir / f"end{rank}.txt").write_text(repr(ends))
    if rank == 0:
        (arguments.output_dir / "weights.sha256").write_text(digest.hexdigest() + "\n")
    if ranks > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
