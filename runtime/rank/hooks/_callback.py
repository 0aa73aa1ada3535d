"""The guard's `TrainerCallback`: what happens at the events of a `train()` call.

Calls `runtime/rank/step/events.py` at the events of a step, restores the exact state, and publishes what the
trainer logs. One callback per `train()` call, added by `train_call.py`. Does not wrap methods
(`_rollout_hooks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback

from grpo_run.runtime.rank.exact.state import ExactState
from grpo_run.runtime.rank.hooks._control import ControlVote
from grpo_run.runtime.rank.hooks._resume import RestoredCall
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.events import StepEvents
from grpo_run.runtime.rank.step.logged import known_metrics, publish_metrics
from grpo_run.runtime.rank.trainer_facts import TrainerFacts


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """The callback of one `train()` call.

    Args:
        ordinal: the number of the call, from 1.
        events: of the call's steps.
        control: puts the flags that callbacks set to the vote.
        restored: the call as the checkpoint has it that `train()` loads, if any.
        record: what the journal records of the call besides its steps.
        loaded: called when everything is loaded.
    """

    def __init__(
        self,
        session: Session,
        ordinal: int,
        events: StepEvents,
        control: ControlVote,
        saver: Saver,
        exact: ExactState,
        facts: TrainerFacts,
        *,
        restored: RestoredCall | None = None,
        record: Mapping[str, Any] = MappingProxyType({}),
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._ordinal = ordinal
        self._saver = saver
        self._events = events
        self._control = control
        self._exact = exact
        self._facts = facts
        self._restored = restored
        self._record = record
        self._loaded = loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the exact state and publish the call; the checkpoint's weights are loaded already."""
        restored = self._restored
        restoring = restored is not None and restored.finished
        self._exact.begin(restored.folder if restored is not None else None)
        self._loaded()
        # what one rollout takes at most; other trainers do not generate
        self._session.slot.generation_limit = float(self._facts.max_completion_length or math.nan)
        self._events.call_begins(
            state.global_step,
            state.max_steps,
            record=self._record,
            restoring=restoring,
            engine_sleeps=self._facts.engine_sleeps,
        )
        if restored is not None and not restoring:
            self._saver.saved_step = state.global_step
            restored.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the sampler's state before it draws the epoch's order."""
        self._exact.begin_epoch()
        self._control.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step's batches have been read."""
        self._events.step_begins(state.global_step + 1)
        self._control.begin_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradient of the step is complete."""
        self._events.optimizer_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is finished; `save_through` calls the saver when transformers has logged, evaluated and
        saved.
        """
        step, asked = state.global_step, self._control.asked(control)
        self._control.answer(control, step, asked, self._events.step_ends(step, asked))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the saver take a snapshot after the events at the end of the epoch."""
        self._exact.end_epoch()
        self._control.end_epoch(control, state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Publish the logged metrics on the board; rank 0 also journals those of a step."""
        logs = logs or {}
        publish_metrics(
            self._session,
            known_metrics(logs),
            logs,
            step=state.global_step,
            train_call=self._ordinal,
            # the summary at the end of training carries train_runtime; its loss is a mean over the call
            journaled="train_runtime" not in logs,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Commit the last step."""
        self._exact.end()
        self._events.call_ends()
