"""The ledger of AsyncGRPO, on rank 0: what was taken from the process of the rollouts for each step, and the
order of prompts when a call goes on.

TRL draws from the first prompt of which it has taken nothing, and forgets what came out of order: such a
prompt would be trained twice. Here the process gets the prompts that no step before has trained; those that
it had drawn and that were not trained are drawn again. A prompt of which some samples were trained counts as
trained, as for TRL. Names of TRL are in `runtime/upstream/async_grpo_names.py`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from grpo_run.runtime.features.ledger._lines import pack, prompt_digest, read_lines
from grpo_run.runtime.features.ledger._replay import Replay, consumed
from grpo_run.runtime.features.ledger._stream import RemainingPrompts, positions
from grpo_run.runtime.features.ledger._writer import Writer
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods

Groups = dict[int, list[int]]
"""Lengths of the samples of each group."""


def is_async(trainer: Any) -> bool:
    """Whether rank 0 of a trainer takes its rollouts from a process or thread of its own."""
    worker = getattr(trainer, async_grpo_names.WORKER, None)
    return hasattr(getattr(worker, async_grpo_names.BUFFER, None), "get")


class AsyncLedger:
    """Of one trainer, for the length of a call."""

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._trainer, self._call = points.trainer, points.train_call
        self._worker = getattr(points.trainer, async_grpo_names.WORKER)
        self._hooks = points.hooks
        self._writer = Writer(session, points.train_call, int(self._trainer.args.num_generations), 1)
        self._order: Iterator[int] = count()
        self._position: dict[int, int] = {}
        self._prompts: dict[int, str] = {}
        self._stale: Groups = defaultdict(list)
        self._collated: deque[Groups] = deque()
        self._trained = 0
        buffer = getattr(self._worker, async_grpo_names.BUFFER)
        get = buffer.get

        def take(*args: Any, **kwargs: Any) -> Any:
            sample = get(*args, **kwargs)
            self._take(sample)
            return sample

        around_trainer = {"get_train_dataloader": [self._load], "training_step": [self._count]}
        points.hooks.enter_context(override_attributes(buffer, get=take))
        points.hooks.enter_context(wrapped_methods(self._worker, {"start": [self._start]}))
        points.hooks.enter_context(wrapped_methods(self._trainer, around_trainer))
        points.step_begins.append(self._writer.step_begins)
        points.step_ends.append(self._step_ends)

    def _start(self, original: Callable[[], None]) -> None:
        """Let the process draw what was not trained."""
        step = int(self._trainer.state.global_step)
        self._writer.step_begins(step + 1)
        dataset, first = async_grpo_names.draws(self._worker) or (None, 0)
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        done: set[int] = set()
        if step and dataset is not None:
            done = consumed(Replay.of(read_lines(self._writer.file), 0).taken, self._call)
        if done:
            first = next(positions(0, done))
            rest = RemainingPrompts(dataset, first - first % size if size else 0, done)
            async_grpo_names.draw_from(self._worker, rest, first if size else 0)
            async_grpo_names.set_trained(self._trainer, len(done))
            self._hooks.callback(async_grpo_names.draw_from, self._worker, dataset, 0)
        self._order = positions(first, done)
        self._writer.write("Q", first, size)
        original()

    def _position_of(self, group: int) -> int:
        while group >= len(self._position):
            self._position[len(self._position)] = next(self._order)
        return self._position[group]

    def _take(self, sample: Any) -> None:
        if sample.group_id not in self._prompts:
            self._prompts[sample.group_id] = prompt_digest(sample.prompt)
        if async_grpo_names.is_too_old(self._trainer, sample):
            self._stale[sample.group_id].append(int(sample.completion_mask.sum()))

    def _load(self, original: Callable[..., Any]) -> Any:
        def prepare(original: Callable[..., Any], loader: Any) -> Any:
            collate = loader.collate_fn

            def collated(examples: Any) -> Any:
                groups: Groups = defaultdict(list)
                for sample in async_grpo_names.samples_of(examples):
                    groups[sample["group_id"]].append(int(sample["completion_mask"].sum()))
                self._collated.append(groups)
                return collate(examples)

            loader.collate_fn = collated
            return original(loader)

        with wrapped_methods(self._trainer.accelerator, {"prepare": [prepare]}):
            return original()

    def _count(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._trained += 1
        return original(*args, **kwargs)

    def _step_ends(self, step: int) -> None:
        trained: Groups = defaultdict(list)
        for _ in range(min(self._trained, len(self._collated))):  # the loader is ahead of the trainer
            for group, lengths in self._collated.popleft().items():
                trained[group] += lengths
        stale, self._stale, self._trained = self._stale, defaultdict(list), 0
        one, other = (
            [
                [self._position_of(group), self._prompts.get(group, ""), pack(lengths)]
                for group, lengths in sorted(part.items())
            ]
            for part in (trained, stale)
        )
        self._writer.write("A", step, one, other)
