"""Replay in a rank: record what a step computes, and end a replay after its last step.

A run without `--keep-every` is not touched. A file that cannot be written ends the recording, never the
training. A loop gives loss and gradient norm to `loop.log`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.replay._changes import Changes
from grpo_run.runtime.features.replay._prompt import interact
from grpo_run.runtime.features.replay.settings import ReplaySettings
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.step_records import Sample, Scored, StepRecord, append, digest_text
from grpo_run.runtime.rank.output import flush_output
from grpo_run.runtime.rank.points import CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.tensor_digests import digests, tensors_of_rank
from grpo_run.runtime.upstream import rollout_names, tensor_files
from grpo_run.runtime.upstream.patches import wrapped_methods
from grpo_run.runtime.upstream.tracker_names import leave_out_trackers
from grpo_run.watchdog.observation import RankState


class StepRecorder:
    """Records the steps of one call on this rank.

    Args:
        replay: of the run.
    """

    def __init__(self, session: Session, points: CallPoints, replay: ReplaySettings) -> None:
        self._session, self._points, self._replay = session, points, replay
        self._last_step = replay.last_step if replay.train_call == points.train_call else 0
        self._replays = self._starts = bool(replay.last_step)
        self._file = RunDirectory(path=session.config.run_directory).steps / f"rank{session.rank}.jsonl"
        self._names: list[str] | None = None
        self._failed = False
        self.rows = range(0)
        """Numbers of the samples of the last rollout on this rank, among those of all ranks in the step."""
        self._rollouts: list[list[Sample]] = []
        self._scored: list[tuple[Any, Any, Any]] = []
        self._losses: list[Any] = []
        self._logged_norm: float | None = None

    def begin_step(self, step: int) -> None:
        """Record what a replay has loaded, before its first step."""
        if self._starts:
            self._starts = False
            self._write(step - 1, starts=True)
        if step == self._last_step and self._replay.terminal:
            self._ask(step)

    def _ask(self, step: int) -> None:
        """Let the user look at the call on one rank; the others wait as for a vote. Collective."""
        session, points = self._session, self._points
        if session.rank == self._replay.shell_rank:
            names = {"trainer": points.trainer, "models": list(points.models), "step": step}
            names["optimizers"] = list(points.present_optimizers())
            banner = f"Step {step} begins on rank {session.rank}: {', '.join(names)}. Ctrl-D goes on."
            interact(self._replay.terminal, names, banner)
        session.votes.collect()
        session.votes.gather([step])

    def note_rollout(self, original: Callable[..., Any], rows: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the samples of a rollout; those of an evaluation are left out."""
        if not self._points.trainer.model.training:
            return original(rows, *args, **kwargs)
        first = self._session.world_size * sum(map(len, self._rollouts)) + self._session.rank * len(rows)
        self.rows = range(first, first + len(rows))
        self._rollouts.append([])
        rollout = original(rows, *args, **kwargs)
        if isinstance(rollout, dict):
            samples = self._rollouts[-1]
            for name, values in rollout_names.by_sample(rollout, len(samples)).items():
                digest = float.hex if name == "advantage" else _digest
                samples[:] = [
                    replace(one, **{name: digest(v)}) for one, v in zip(samples, values, strict=True)
                ]
        return rollout

    def note_rewards(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the rows of a rollout with their rewards, which may be computed twice."""
        rewards, trainer = original(*args, **kwargs), self._points.trainer
        if trainer.model.training and self._rollouts and len(args) >= 4 and hasattr(rewards, "shape"):
            _, prompts, _, tokens = args[:4]
            first = self._session.rank * len(prompts)
            table = rewards[first : first + len(prompts)].tolist()
            names = list(getattr(trainer, "reward_func_names", ()))
            self._rollouts[-1] = [
                Sample(
                    prompt=_digest(prompt),
                    completion=_digest(list(completion)),
                    rewards={name: value.hex() for name, value in zip(names, values, strict=False)},
                    number=number,
                )
                for number, prompt, completion, values in zip(self.rows, prompts, tokens, table, strict=False)
            ]
        return rewards

    def note_scores(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the log-probabilities of a forward pass of which there is a gradient; read after the step."""
        scores = original(*args, **kwargs)
        if isinstance(scores, tuple) and scores[0].requires_grad:
            given = dict(zip(rollout_names.SCORED, args, strict=False)) | kwargs
            ids, mask = (given[name] for name in rollout_names.SCORED[1:])
            self._scored.append((scores[0].detach(), ids, mask))
        return scores

    def note_logged(self, values: Mapping[str, float]) -> None:
        """Note what a loop logs of the step."""
        if "loss" in values:
            self._losses = [values["loss"]]
        self._logged_norm = values.get("grad_norm", self._logged_norm)

    def note_loss(self, loss: Any) -> None:
        """Note the raw loss of a micro-batch."""
        self._losses.append(loss)

    def end_step(self, step: int) -> None:
        """Record the step."""
        self._write(step)
        self._rollouts, self._scored, self._losses, self._logged_norm = [], [], [], None
        if self._replays:
            self._points.alarm = None  # the run has gone on, or has recorded why it has not

    def step_over(self, step: int) -> None:
        """End the rank after the last step of a replay. Collective then."""
        if step == self._last_step:
            self._session.votes.collect()
            self._session.votes.gather([step])  # all ranks have written
            _end(self._session)

    def _write(self, step: int, *, starts: bool = False) -> None:
        if self._failed:
            return
        held = list(tensors_of_rank(self._points.models, self._points.present_optimizers()))
        norm = self._points.gradient_norm() if self._logged_norm is None else self._logged_norm
        names, values = [name for name, _ in held], digests([tensor for _, tensor in held])
        record = StepRecord(
            train_call=self._points.train_call,
            step=step,
            samples=[] if starts else [one for rollout in self._rollouts for one in rollout],
            generations=int(getattr(self._points.trainer, "num_generations", 0)) if self._rollouts else 0,
            scored=[one for scores in self._scored for one in _scored(*scores)],
            loss=_hex(self._losses),
            grad_norm=None if norm is None else norm.hex(),
            names=None if names == self._names else names,
            digests="".join(map(digest_text, values)),
            starts=starts,
        )
        self._names = names
        try:
            if append(self._file, record):
                self._names = None
        except OSError as error:
            self._failed = True
            self._session.warn_in_journal(f"steps are no longer recorded: {error}")


def _hex(values: list[Any]) -> str | None:
    """Return every bit of a sum of numbers."""
    if not values:
        return None
    return float(sum(float(tensor_files.local_part(value)) for value in values)).hex()


def _scored(logps: Any, ids: Any, mask: Any) -> list[Scored]:
    """Return what is recorded of each row of a forward pass."""
    kept = mask[:, -logps.shape[1] :].bool()
    values = [row[of_row] for row, of_row in zip(logps, kept, strict=True)]
    return [
        Scored(_digest(tokens), digest_text(digest), total.hex())
        for tokens, digest, total in zip(
            rollout_names.unpadded(ids, mask),
            digests(values),
            logps.double().masked_fill(~kept, 0).sum(1).tolist(),
            strict=True,
        )
    ]


def _digest(value: Any) -> str:
    content = msgspec.json.encode(value, enc_hook=repr)
    return f"{zlib.crc32(content):08x}"


def _end(session: Session) -> NoReturn:
    """End the rank: what the script does after its training is no part of a replay."""
    session.slot.state = RankState.done
    session.slot.publish()
    flush_output()
    os._exit(0)


def _leave_out(trainer: Any) -> None:
    """Leave out what a replay must not do again: trackers, uploads, and the script's saves."""
    trainer.args.save_strategy = type(trainer.args.save_strategy)("no")
    leave_out_trackers(trainer)


class ReplayPart(RankFeature):
    """Replay at the points of a rank."""

    name = ReplaySettings.NAME

    def __init__(self) -> None:
        self._recorder: StepRecorder | None = None

    def call(self, session: Session, points: CallPoints) -> None:
        """Record the steps of a call, if the run keeps checkpoints or is a replay."""
        replay = session.config.of(ReplaySettings)
        if not (session.config.keep_every or replay.last_step):
            self._recorder = None
            return
        self._recorder = recorder = StepRecorder(session, points, replay)
        points.losses.append(recorder.note_loss)
        scores = {rollout_names.SCORE: [recorder.note_scores]}
        points.hooks.enter_context(wrapped_methods(points.trainer, scores))
        if points.trainer is not None and replay.last_step:
            _leave_out(points.trainer)
        points.logged.append(recorder.note_logged)
        points.step_begins.append(recorder.begin_step)
        points.step_ends.append(recorder.end_step)
        points.steps_over.append(recorder.step_over)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Note the samples of the call's rollouts."""
        recorder, replay = self._recorder, session.config.of(ReplaySettings)
        if recorder is None:
            return
        points.inputs.insert(0, recorder.note_rollout)
        points.rewards.append(recorder.note_rewards)
        if replay.changes_from and train_call == replay.train_call:
            try:
                changes = Changes(trainer, points.facts, replay, lambda: recorder.rows)
            except ConfigError as error:  # on all ranks
                session.warn_in_journal(str(error))
                _end(session)
            points.leaving.append(changes.row_reasons)
            points.reward_functions.append(changes.replaced)


PART = ReplayPart()
