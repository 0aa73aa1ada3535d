"""Whole scripts whose containers are of an epoch, or bound themselves: no leak, unless what each epoch has made is kept."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace import tracer
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding

CLEAN = {
    "list_of_a_function": """
        def epoch():
            kept = []
            for _ in range(20): kept.append(made())
        for _ in range(4): epoch()
    """,
    "list_of_a_method": """
        class Runner:
            def fit(self):
                for _ in range(4): self.train()
            def train(self):
                kept = []
                for _ in range(20): kept.append(made())
        Runner().fit()
    """,
    "object_of_an_epoch": """
        class Storage:
            def __init__(self): self.kept = []
            def add(self, one): self.kept.append(one)
        for _ in range(4):
            storage = Storage()
            for _ in range(20): storage.add(made())
    """,
    "result_of_a_comprehension": """
        for _ in range(4): results = [made() for _ in range(20)]
    """,
    "tensor_of_a_function": """
        def epoch():
            seen = torch.zeros(0, 40)
            for _ in range(20): seen = torch.cat([seen, made()[None]])
        for _ in range(4): epoch()
    """,
    "states_of_a_metric": """
        class Metric:
            def __init__(self):
                self.names = []
                self.add_state("kept")
            def add_state(self, name):
                setattr(self, name, [])
                self.names.append(name)
            def reset(self):
                for name in self.names: setattr(self, name, [])
        class Logits(Metric):
            def update(self, one): self.kept.append(one)
        metric = Logits()
        for _ in range(4):
            for _ in range(20): metric.update(made())
            metric.reset()
    """,
    "a_second_init": """
        class Metric:
            def __init__(self): self.kept = []
            def update(self, one): self.kept.append(one)
            def reset(self): self.__init__()
        metric = Metric()
        for _ in range(4):
            for _ in range(20): metric.update(made())
            metric.reset()
    """,
    "a_hook_of_each_epoch": """
        class Callback:
            def on_epoch_begin(self): self.kept = []
            def on_step(self, one): self.kept.append(one)
        callback = Callback()
        for _ in range(4):
            callback.on_epoch_begin()
            for _ in range(20): callback.on_step(made())
    """,
    "cleared_by_its_caller": """
        class Log:
            def __init__(self): self.kept = []
        def epoch(log):
            for _ in range(20): log.kept.append(made())
        log = Log()
        for _ in range(4):
            epoch(log)
            log.kept.clear()
    """,
    "cleared_with_others": """
        class Log:
            def __init__(self): self.kept, self.more = [], []
            def clear_all(self):
                for one in (self.kept, self.more): one.clear()
        log = Log()
        for _ in range(4):
            for _ in range(20): log.kept.append(made())
            log.clear_all()
    """,
    "lists_in_a_dictionary": """
        kept = {"logits": [], "rewards": []}
        for _ in range(4):
            for _ in range(20): kept["logits"].append(made())
            for one in kept.values(): one.clear()
    """,
    "trimmed_in_a_dictionary": """
        from collections import defaultdict
        kept = defaultdict(list)
        for _ in range(60):
            kept["logits"].append(made())
            if len(kept["logits"]) > 12: kept["logits"].pop(0)
    """,
    "lists_that_are_replaced_in_a_dictionary": """
        class Log:
            def __init__(self): self.kept = {"logits": []}
            def begin(self): self.kept["logits"] = []
        log = Log()
        for _ in range(4):
            for _ in range(20): log.kept["logits"].append(made())
            log.begin()
    """,
    "window_of_a_generator": """
        def window():
            kept = []
            while True:
                kept.append((yield kept))
                if len(kept) > 12: kept.pop(0)
        last = window()
        next(last)
        for _ in range(60): last.send(made())
    """,
    "class_that_bounds_itself": """
        from collections import OrderedDict
        class Recent(OrderedDict):
            def __setitem__(self, key, one):
                super().__setitem__(key, one)
                if len(self) > 12: self.popitem(last=False)
        kept = Recent()
        for step in range(60): kept[step] = made()
    """,
    "bounded_objects_in_a_list": """
        from collections import deque
        class Recent:
            def __init__(self): self.kept = deque(maxlen=40)
        class Last:
            def __init__(self): self.kept = []
            def add(self, one): self.kept = [*self.kept, one][-3:]
        callbacks = [Recent(), Last()]
        for _ in range(60):
            one = made()
            callbacks[0].kept.append(one)
            callbacks[1].add(one + 1)
    """,
    "ring_that_is_being_filled": """
        class Ring:
            def __init__(self): self.kept, self.place = [], 0
            @property
            def is_full(self): return len(self) == 30
            def __len__(self): return len(self.kept)
            def add(self, one):
                if self.is_full: self.kept[self.place] = one
                else: self.kept.append(one)
                self.place = (self.place + 1) % 30
        ring = Ring()
        for _ in range(90): ring.add(made())
    """,
}
"""Scripts that keep nothing without need."""

LEAKS = {
    "all_epochs_are_kept": ("growth", "list `kept`", """
        def epoch():
            own = []
            for _ in range(10): own.append(made())
            return own
        kept = []
        for _ in range(12): kept.append(epoch())
    """),
    "objects_of_all_epochs_are_kept": ("growth", "list `kept` of Store", """
        class Episode:
            def __init__(self): self.parts = []
        class Store:
            def __init__(self): self.kept = []
        store = Store()
        for _ in range(12):
            episode = Episode()
            for _ in range(10): episode.parts.append(made())
            store.kept.append(episode)
    """),
    "an_object_for_each_layer": ("growth", "list `kept` of Recorder", """
        class Recorder:
            def __init__(self): self.kept = []
        recorders = []
        for _ in range(3): recorders.append(Recorder())
        for _ in range(20):
            new = made()
            for one in recorders: one.kept.append(new + 1)
    """),
    "graphs_of_an_epoch": ("graph", "list `kept` in epoch()", """
        def epoch():
            kept = []
            for _ in range(20): kept.append((made().requires_grad_() * 2).exp().sum())
        for _ in range(3): epoch()
    """),
    "list_of_a_generator": ("growth", "list `kept` in collect()", """
        def collect():
            kept = []
            while True: kept.append((yield))
        collected = collect()
        next(collected)
        for _ in range(20): collected.send(made())
    """),
    "lists_that_are_looked_up": ("growth", "a list in dict `kept`", """
        kept = {}
        for _ in range(30):
            if "logits" not in kept: kept["logits"] = []
            kept["logits"].append(made())
            kept.get("logits")
    """),
    "default_of_a_keyword": ("growth", "a list in function `add`", """
        def add(one, *, kept=[]): kept.append(one)
        for _ in range(20): add(made())
    """),
    "attribute_of_a_context": ("graph", "list `kept`", """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, one):
                ctx.kept = one * 2
                return one.clone()
            @staticmethod
            def backward(ctx, gradient): return gradient * 2
        kept = []
        for _ in range(20): kept.append(Twice.apply(made().requires_grad_()).sum())
    """),
    "arguments_of_a_cached_function": ("growth", "cached", """
        import functools
        @functools.cache
        def cached(one): return 1
        for _ in range(20): cached(made())
    """),
    "made_at_its_first_use_in_a_step": (
        "growth",
        "list `kept` of Callback",
        """
        class Callback:
            def on_step(self, one):
                if not hasattr(self, "kept"): self.kept = []
                self.kept.append(one)
        callback = Callback()
        for _ in range(20): callback.on_step(made())
    """,
    ),
    "hooks_of_a_layer": ("growth", "OrderedDict `_forward_hooks` of Linear", """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        for _ in range(20): model[0].register_forward_hook(lambda m, i, o, one=made(): None)
    """),
}  # fmt: skip
"""Scripts that leak, with the kind and the holder that are named."""


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, no_history: Any, tmp_path: Path
) -> Callable[[str], list[TraceFinding]]:
    """Runs a script in which each call of `made()` ends a step, and returns what is found."""
    monkeypatch.setattr(tracer, "SHARE", 1e9)

    def run(source: str) -> list[TraceFinding]:
        found: list[TraceFinding] = []
        trace = tracer.MemoryTrace(found.append, no_history, pytest.fail)
        step = 0

        def made() -> torch.Tensor:
            nonlocal step
            if step:
                trace.step_ended(step)
            step += 1
            return torch.full((40,), float(step))

        file = tmp_path / "script_of_test.py"
        file.write_text(textwrap.dedent(source))
        specification = importlib.util.spec_from_file_location("script_of_test", file)
        assert specification is not None
        assert specification.loader is not None
        script = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, "script_of_test", script)
        vars(script).update(torch=torch, made=made)
        try:
            specification.loader.exec_module(script)
        finally:
            trace.end()
        return found

    return run


@pytest.mark.parametrize("name", CLEAN)
def test_what_ends_with_its_epoch_or_is_bounded_is_no_leak(
    name: str, run_script: Callable[[str], list[TraceFinding]]
) -> None:
    """Though it has tensors of more than enough steps before it is emptied, replaced or full."""
    assert run_script(CLEAN[name]) == []


@pytest.mark.parametrize("name", LEAKS)
def test_what_outlives_its_epoch_or_is_never_emptied_is_found(
    name: str, run_script: Callable[[str], list[TraceFinding]]
) -> None:
    """And named by what keeps it, not by what looks alike and is bounded."""
    kind, holder, source = LEAKS[name]
    found = run_script(source)
    assert [(one.kind, holder in (one.holder or "")) for one in found] == [(kind, True)], [
        one.holder for one in found
    ]
