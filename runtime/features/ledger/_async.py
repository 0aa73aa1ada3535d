"""The ledger of AsyncGRPO, on rank 0: what each step has trained of what a process has made, and which
prompts it draws when a call goes on.

TRL goes on with the first prompt of which it has taken no row. It forgets what came out of order, which would
be trained twice, and what it has taken ahead of training, which would be lost. Here a checkpoint holds which
prompts are done. The others are drawn again; of one that was trained in part, as many rows are left out as
the trainer had taken. What the rows of a group hold follows from their order: the shorter ones come first.

The state of a call is loaded after TRL has asked for the process, so the process of a call that goes on
starts then. Where TRL is another one, nothing is changed and nothing is written. Called by `rank.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.runtime.features.ledger._lines import pack
from grpo_run.runtime.features.ledger._stream import PromptOrder
from grpo_run.runtime.features.ledger._writer import Writer
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names
from grpo_run.runtime.upstream.patches import override_attributes, wrapped_methods
from grpo_run.runtime.upstream.remaining_prompts import RemainingPrompts

STATE = "async_prompts"


class AsyncLedger:
    """Of one trainer, for the length of a call."""

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._session, self._trainer, self._hooks = session, points.trainer, points.hooks
        self._worker = getattr(points.trainer, async_grpo_names.WORKER)
        self._writer = Writer(session, points.train_call, int(self._trainer.args.num_generations), 1)
        self._order, self._known = PromptOrder(), True
        self._start: Callable[[], None] | None = None
        """Starts the process, as soon as the state is loaded."""
        buffer = getattr(self._worker, async_grpo_names.BUFFER)
        self._get = buffer.get
        self._hooks.enter_context(override_attributes(buffer, get=self.take))
        self._hooks.enter_context(wrapped_methods(self._worker, {async_grpo_names.START: [self.start]}))
        self._hooks.enter_context(wrapped_methods(self._trainer, {"training_step": [self._train]}))
        async_grpo_names.tell_collated(self._trainer, self._hooks, lambda rows: self._order.collate(rows))
        points.step_ends.append(self.end_step)
        points.states.append(self)
        points.keeps_order = True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {STATE: self._order.state()} if self._known else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Start the process that has waited for this."""
        self._draw(state.get(STATE))

    def start(self, original: Callable[[], None]) -> None:
        """Start the process, unless the state of the call is loaded later."""
        self._start = original
        if not self._trainer.state.global_step:
            self._draw(None)

    def _draw(self, state: Any) -> None:
        """Start the process if it waits, with the prompts that are not done."""
        start, self._start = self._start, None
        if start is None:
            return
        step = int(self._trainer.state.global_step)
        dataset, first = async_grpo_names.draws(self._worker)
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        self._order = order = PromptOrder(**(state or {"first": first}))
        if state:
            rest = RemainingPrompts(dataset, order.first, order.done)
            async_grpo_names.draw_from(self._trainer, rest, order.first if size else 0, order.trained)
            self._hooks.callback(async_grpo_names.draw_from, self._trainer, dataset, 0, 0)
        elif step:
            said = f"the checkpoint of step {step} does not hold which prompts of AsyncGRPO are done"
            self._session.warn(f"{said}: it goes on with prompt {first}, as TRL does")
        self._writer.step_begins(step + 1)
        self._writer.write("Q", order.first, size, order.done, [at for at, _ in order.partial])
        start()

    def take(self, *args: Any, **kwargs: Any) -> Any:
        """Take a row from the queue, and note it."""
        self._draw(None)  # it waits in vain if the checkpoint is not one of ours
        while True:
            sample = self._get(*args, **kwargs)
            number, length = async_grpo_names.group_and_tokens(sample)
            reason = async_grpo_names.dropped(self._trainer, sample)
            if not self._known or self._order.take(number, sample.prompt, length, reason):
                return sample

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._known and not self._order.train():
            self._known = False
            self._session.warn("the ledger ends here: this trainer collates rows of AsyncGRPO in its own way")
        return original(*args, **kwargs)

    def end_step(self, step: int) -> None:
        """Write what the step has trained, and what was left out until then."""
        parts = self._order.end_step() if self._known else []
        for reason in sorted({one.reason for one in parts}):
            texts = (one.prompt + pack([one.position, *one.lengths]) for one in parts if one.reason == reason)
            self._writer.write("A", step, reason, *texts)
