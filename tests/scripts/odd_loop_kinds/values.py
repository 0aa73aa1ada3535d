"""Loops whose state has values of many types, and values that the script's variables refer to."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch

from odd_loop_kinds.training import Training


def values(t: Training) -> None:
    """Values of many types, some of which change their type."""
    t.state |= {
        "none": None, "tuple": (1, (2.5, "x")), "counter": collections.Counter("ab"),
        "queue": collections.deque([1], maxlen=3),
        "table": collections.defaultdict(list), "array": np.arange(4.0), "scalar": np.float32(1.5),
        "ordered": collections.OrderedDict(a=1),
        "tensor": torch.zeros(3), "keys": {1: "one", (2, 3): "two"}, "bytes": b"\x00\xff", "set": {1, 2},
        "nan": float("nan"),
        "big": 2**80, "complex": 1 + 2j, "frozen": frozenset({3}), "rng": random.Random(4),
        "numpy": np.random.default_rng(6),
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
