"""One supervised loop of one attempt: resume, commit steps, save, log, and end.

`loop.steps` iterates over it (`steps.py`), and `loop.begin` returns it. `LoopContents` is what the loop's
checkpoints contain, for the savers in `runtime/rank/saving/`: the script's objects and what each rank keeps
for itself. `log_values` takes what the script gives to `loop.log`; `trainers/loop.py` finds it through the
guard, and `runtime/rank/step/logged.py` publishes the numbers. Outside `grpo-run launch`, `steps.py` has a
plain loop in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.history.events import LoopLeft
from grpo_run.runtime.launch.rehearsal import current
from grpo_run.runtime.rank.exact.gradient_order import GradientOrder, needs_gradient_order
from grpo_run.runtime.rank.loops import _rank_state as rank_state
from grpo_run.runtime.rank.loops._optimizers import OptimizerSteps
from grpo_run.runtime.rank.loops._rank_state import LoadedRankState
from grpo_run.runtime.rank.loops._state import LoopState
from grpo_run.runtime.rank.loops.data_position import DataPosition
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.resuming.request import ResumeChoice
from grpo_run.runtime.rank.saving.contents import CheckpointContents
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.session import LeftLoop, Session
from grpo_run.runtime.rank.step.events import StepEvents, finish, leave
from grpo_run.runtime.rank.step.guard import AttemptState, guard_of
from grpo_run.runtime.rank.step.logged import known_metrics, publish_metrics
from grpo_run.runtime.rank.step.resume import CallFacts, agree_on_resume, held_snapshot, resumed_directory
from grpo_run.runtime.rank.step.step_vote import StepVote
from grpo_run.watchdog.observation import Phase, RankState


class LoopContents(CheckpointContents):
    """The contents of the checkpoints of one loop, and its step.

    Args:
        limit: the script's `save_total_limit`.
        write_rank_state: writes what each rank keeps for itself into the checkpoint's directory.
    """

    step = 0
    """The last finished step."""
    call_ends = False
    """Whether the loop takes no further step."""
    awaits_events = False
    limit: int | None = None

    def __init__(
        self,
        session: Session,
        call: TrainCall,
        state: LoopState,
        *,
        limit: int | None,
        write_rank_state: Callable[[Path], None],
    ) -> None:
        super().__init__(session, call, description=state.description(), size_bytes=state.size_bytes())
        self.limit = limit
        self._state = state
        self._write_rank_state = write_rank_state

    def parameters(self) -> Iterable[Any]:
        """Return the parameters of all modules."""
        return self._state.parameters()

    def large_files(self) -> Mapping[str, int]:
        """Return the sizes of this rank's modules and optimizers."""
        return self._state.large_files()

    def write(self, folder: Path) -> None:
        """Write this rank's part. Not collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self._state.write(folder)
        self._write_rank_state(folder)


def log_values(session: Session, points: CallPoints, step: int, values: Mapping[str, Any]) -> None:
    """Publish the numbers that are known of what the script logs of one loop. Not collective.

    Args:
        points: what features add to the loop.
        step: in progress, counted from 1.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only one thread writes the slot
    metrics = known_metrics(values)
    for logged in points.logged:
        logged(metrics)
    publish_metrics(session, metrics, values, step=step, train_call=points.train_call)


class SupervisedLoop:
    """A loop in a rank of `grpo-run launch`. Making one is collective: all ranks agree on where it starts.

    Args:
        total: how many steps the loop takes; None if not known.
        data: the position in its data; None if the loop does not read it.

    Raises:
        ConfigError: the state cannot be saved, or another call is running.
        CheckpointError: the checkpoint does not fit the state.
        Stopped: the user has asked for a stop.
    """

    def __init__(
        self,
        session: Session,
        total: int | None,
        *,
        state: MutableMapping[str, Any],
        output_dir: str | os.PathLike[str],
        data: DataPosition | None = None,
        save_every: int | None = None,
        save_total_limit: int | None = None,
    ) -> None:
        self._session = session
        if (rehearsal := current()) is not None:
            span = rehearsal.span()
            total, save_every = min(total or span.steps, span.steps), save_every and span.save_every
        self._total = self._last_step = total
        self._data = data
        self._save_every = save_every
        self._guard = guard_of(session)
        _check_not_nested(self._guard)
        self._state = LoopState(state, rank=session.rank, world_size=session.world_size)
        rank_state.check_values(self._state)
        self._orders = {
            key: GradientOrder(module)
            for key, module in self._state.wrapped.items()
            if needs_gradient_order(module, session.world_size)
        }
        self._loaded: LoadedRankState | None = None
        self._leaves_early = False
        self._left: LeftLoop | None = None
        """Set while the script has left the loop, and may go on with it."""
        self._hooks = ExitStack()
        self._guard.running = LOOP
        try:
            self._begin(output_dir, save_total_limit)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, output_dir: str | os.PathLike[str], save_total_limit: int | None) -> None:
        session, guard = self._session, self._guard
        call = guard.begin_call(LOOP, guard.output_directory(os.fspath(output_dir)))
        facts = CallFacts(
            parameters=self._state.named_shapes() if session.is_main else (), settings=self._digest()
        )
        agreed = agree_on_resume(guard, call, None, facts)
        self._call, resume = agreed.call, agreed.choice
        self._contents = LoopContents(
            session, self._call, self._state, limit=save_total_limit, write_rank_state=self._write_rank_state
        )
        self._points = CallPoints(
            train_call=self._call.ordinal,
            models=self._state.modules.values(),
            optimizers=self._state.optimizers.values(),
            hooks=self._hooks,
            leave_loop=self._leave_early,
        )
        for feature in guard.features:
            feature.call(session, self._points)
        self._step_vote = StepVote(session, guard.requests, self._points)
        self._saver = Saver(
            self._contents, session, snapshots=guard.snapshots, collect_vote=self._step_vote.collect
        )
        self._events = StepEvents(session, self._call.ordinal, self._step_vote, self._saver, self._points)
        self._optimizers = OptimizerSteps(
            self._state.optimizers.values(), before=self._before_optimizer, after=self._after_optimizer
        )
        self._load(resume)
        for order in self._orders.values():
            self._hooks.callback(order.close)
            if order.order is None:
                order.record()
        over = resume.finished and not (resume.foreign and self.step < (self._total or 0))
        self._events.call_begins(self.step, self._total or 0, record=agreed.record, restoring=over)
        if over:
            self._ended()
            return
        if (left_after := self._agree_left_after()) is not None:
            self._last_step = left_after
            session.notify(
                f"{self._call.title} ends after step {left_after}: the script left it there before the"
                " restart"
            )
        guard.logs = self._log
        self._optimizers.install()
        self._hooks.callback(self._optimizers.remove)
        for module in self._state.modules.values():
            if getattr(module, "_compiled_call_impl", None) is None:  # a hook would break the graph
                handle = module.register_forward_pre_hook(lambda *arguments: session.slot.record_pass())
                self._hooks.callback(handle.remove)
        if self._last_step is not None and self.step >= self._last_step:
            self._finish()  # a rank was killed between the last step and the end

    def _agree_left_after(self) -> int | None:
        """Return after how many steps the script left this loop in an earlier attempt, or None. Collective.

        What the script decides this by may be lost: a variable outside `state`, or the time.
        """
        session, steps = self._session, set[int]()
        for known in session.settings.known_calls if session.is_main else ():
            if (known.ordinal, known.settings) == (self._call.ordinal, self._digest()):
                all_left = len(known.left) == session.local_world_size
                steps = {after for _, after in known.left} if all_left else set()
        agreed = session.votes.maximum(steps.pop() + 1 if len(steps) == 1 else 0)
        return agreed - 1 if agreed else None

    def _load(self, resume: ResumeChoice) -> None:
        """Load the checkpoint that all ranks have agreed on, from memory or from disk."""
        folder = resumed_directory(resume.argument, self._call)
        if folder is None:
            return
        with held_snapshot(self._guard, resume):
            self._state.load(folder)
            loaded = LoadedRankState(folder, self._session.rank, self._device())
        loaded.restore(self._state)
        self._points.load(loaded.features)
        if self._data is not None and loaded.data is not None:
            self._data.load(loaded.data)
        for key, order in self._orders.items():
            if key in loaded.gradient_orders:
                order.replay(loaded.gradient_orders[key])
        rank_state.set_random_state(self._state.generators, loaded.randomness)
        self._loaded = loaded
        self._contents.step = self._saver.saved_step = loaded.step

    @property
    def step(self) -> int:
        """How many steps are finished: the step that is next, counted from 0."""
        return self._contents.step

    @property
    def ended(self) -> bool:
        """Whether the loop takes no further step."""
        return self._contents.call_ends

    def restore_randomness(self) -> None:
        """Set the random generators as the checkpoint has them, once, after what the script did in
        between.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            rank_state.set_random_state(self._state.generators, loaded.randomness)

    def begin_step(self) -> None:
        """Publish that the body of a step begins; its data has been read."""
        self._events.step_begins(self.step + 1)

    def commit(self) -> None:
        """Count the step in progress: vote on it, and save what is due. Collective.

        Raises:
            ConfigError: the step leaves gradients that no optimizer has used.
            ConsensusError: the ranks are at different steps.
            Stopped: all ranks have agreed to stop.
        """
        self._loaded = None
        self._points.optimized = self._optimizers.taken
        if self._optimizers.take_pending():
            raise ConfigError(
                f"step {self.step} of a loop ends with gradients that no optimizer has used, which a"
                " checkpoint cannot hold: accumulate gradients within one step of the loop"
            )
        self._contents.step += 1
        step = self._contents.step
        self._contents.call_ends |= self._last_step is not None and step >= self._last_step
        self._events.step_ends(step)
        if self._save_every and step % self._save_every == 0:
            self._saver.save(self._contents.write)
        self._events.checkpoint()
        if self._leaves_early:
            self.leave()
            self._contents.call_ends = True
        elif self.ended:
            self._finish()

    def end(self) -> None:
        """End the loop and save it. Collective. A second call does nothing.

        The step in progress counts if an optimizer has taken a step in it on any rank: what is saved contains
            it.
        """
        if self.ended:
            return
        self._step_vote.collect()
        self._contents.call_ends = True
        if self._session.votes.maximum(int(self._optimizers.taken)):
            self.commit()
        else:
            self._finish()

    def _finish(self) -> None:
        self._contents.call_ends = True
        self._events.call_ends()
        finish(self._session, self._call, self._saver, self.step)
        self._ended()

    def _ended(self) -> None:
        self._contents.call_ends = True
        self.abandon()
        leave(self._session)

    def abandon(self) -> None:
        """Leave the loop without an end. Not collective."""
        self._hooks.close()
        self._guard.running = self._guard.logs = None

    def leave(self) -> None:
        """Abandon the loop, and publish that no call is running."""
        if self._left is not None:  # already published; another call may be running
            self._hooks.close()
        elif not self.ended and not self._session.script_ended:
            self.abandon()
            leave(self._session)

    def pause(self) -> None:
        """The script has left the loop: another call may begin, or this loop may go on. Not collective.

        Python does not show an iterator whether `break` or an exception discards it. So the loop counts as
        left on purpose only when another call begins or the script ends without an exception.
        """
        session, guard = self._session, self._guard
        if self.ended or self._left is not None or session.script_ended or not session.is_rank:
            return
        after = self.step + int(self._optimizers.taken or not self._state.optimizers)

        def record() -> None:
            session.journal.write(
                LoopLeft(rank=session.rank, step=self.step, train_call=self._call.ordinal, ends_after=after)
            )

        self._left = LeftLoop(session.slot.open_phases[0], record)
        session.left = self._left
        guard.running = guard.logs = None
        guard.left = self._hooks
        leave(session)

    def go_on(self) -> None:
        """Go on with the loop if the script has left it.

        Raises:
            ConfigError: another call has begun since.
        """
        if self._left is None:
            return
        if self._session.left is not self._left:
            raise ConfigError(
                "a loop that was left early continues after another call has started: call its `end()` first"
            )
        self._left = self._session.left = None
        self._guard.running, self._guard.logs, self._guard.left = LOOP, self._log, None
        slot = self._session.slot
        slot.state = RankState.training
        slot.replace(Phase.data)
        slot.publish()

    def _log(self, values: Mapping[str, Any]) -> None:
        log_values(self._session, self._points, self.step + 1, values)

    def _leave_early(self) -> None:
        """Stop iterating after the present step, on this rank alone: a fault that a feature causes."""
        self._leaves_early = True

    def _before_optimizer(self) -> None:
        if self._left is None:
            self._events.optimizer_begins()

    def _after_optimizer(self) -> None:
        if self._left is None:  # a step of the loop may have several of an optimizer
            self._session.slot.replace(Phase.forward_backward)

    def _write_rank_state(self, folder: Path) -> None:
        orders = {key: order.order for key, order in self._orders.items()}
        rank_state.save(
            folder,
            self._state,
            step=self.step,
            data=self._data,
            gradient_orders={key: order for key, order in orders.items() if order is not None},
            features=self._points.state(),
        )

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._state.parameters()), torch.device("cpu"))

    def _digest(self) -> str:
        """Return a digest of what tells this loop apart from others of the script."""
        kinds = {key: type(value).__qualname__ for key, value in self._state.entries.items()}
        text = json.dumps([self._total, sorted(kinds.items())])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _check_not_nested(guard: AttemptState) -> None:
    if guard.running is None:
        return
    if guard.running == LOOP:
        raise ConfigError(
            "a loop begins before the loop before it has ended: loops cannot be nested; a loop over `while`"
            " ends with `run.end()`"
        )
    raise ConfigError(
        f"a loop begins inside {guard.running}.train(): its steps belong to those of the Trainer; iterate"
        " with `range` there"
    )
