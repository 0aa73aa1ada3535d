"""What a call resumes from: agreed on by all ranks, reported and journaled.

Called by `runtime/rank/hooks/train_call.py` and `runtime/rank/loops/run.py` before anything is loaded.
`runtime/rank/resuming/choice.py` chooses the checkpoint and distributes the choice; this module collects its
inputs and reports the outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.compatibility import BatchGeometry, NamedShape
from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished
from grpo_run.runtime.checkpoints.publishing import begin_attempt, clean_partial_directories
from grpo_run.runtime.checkpoints.search import directories_of_run, output_directory_of, step_of
from grpo_run.runtime.claims import claim
from grpo_run.runtime.errors import ResumeMismatchError, Stopped
from grpo_run.runtime.history import checkpoint_backups
from grpo_run.runtime.history.events import ResumeChosen, TrainRestored
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.train_calls import CallDirectory
from grpo_run.runtime.rank.resuming.choice import agree
from grpo_run.runtime.rank.resuming.identification import IdentifiedCall, find_mismatch, identify
from grpo_run.runtime.rank.resuming.memory import checkpoint_for, open_expected
from grpo_run.runtime.rank.resuming.request import ResumeChoice, ResumeRequest
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.snapshots.slot import path_of

UNFENCED = "a host that has lost touch could still change the checkpoints of this run"


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """What the checkpoints of a call must fit.

    Attributes:
        batch: how the samples of a step are spread over ranks; None if not known.
        parameters: of the model that the script has built; empty if not known, and on other ranks than 0.
        settings: digest of what tells the call apart from others of its class; empty if there is nothing.
    """

    batch: BatchGeometry | None = None
    parameters: tuple[NamedShape, ...] = ()
    settings: str = ""


@dataclass(frozen=True, kw_only=True)
class AgreedResume:
    """A call with its number in the run, what it resumes from, and what rank 0 records when it has begun."""

    call: TrainCall
    choice: ResumeChoice
    record: Mapping[str, Any] = field(default_factory=dict)


def agree_on_resume(
    guard: AttemptState, call: TrainCall, script_argument: str | bool | None, facts: CallFacts
) -> AgreedResume:
    """Choose on rank 0 what the call resumes from, and return the same choice on every rank. Collective.

    Args:
        call: numbered by its position in the script.
        script_argument: the script's own `resume_from_checkpoint` argument; None if it gave none.
        facts: what checkpoints must fit.

    Raises:
        Stopped: the user requested a stop before the call.
        UsageError: on rank 0, if the requested checkpoint cannot be used, or another live run trains into the
            same output directory.
        ConfigError: a rank cannot see the chosen checkpoint.
        ResumeMismatchError: on rank 0, if the call repeats or leaves out work of this run although the user
            has asked for none (`--require-resume`).
    """
    session, claimed = guard.session, frozenset(guard.claimed)
    # a vote is still in progress if the script caught the exception that ended its previous train() call
    session.votes.collect()
    fence, output_dir = None, Path(call.output_dir)
    if session.is_main:
        _claim(session, call)
        fence = _prepare(session, output_dir, needed=session.world_size > session.local_world_size)
    refused_before = _refused_before(session, output_dir)
    # the fences of older attempts are removed only after every rank has been heard of
    stop = session.votes.maximum(int(session.board.requests[0]))
    if stop:
        if fence is not None:
            fencing.close(fence)
        raise Stopped(session.slot.step)
    snapshot = open_expected(session, guard.expected_snapshot(), claimed)
    config, settings = session.config, session.settings
    request = ResumeRequest(
        call=call,
        run_id=config.run_id,
        world_size=session.world_size,
        first_attempt=settings.first_attempt,
        run_started_at=settings.run_started_at,
        script_argument=script_argument,
        resume_from=config.resume_from,
        fresh=config.fresh,
        batch=facts.batch,
        parameters=facts.parameters,
        in_memory=snapshot.checkpoint if snapshot is not None else None,
    )
    rejected_before = session.rejected_checkpoints
    identified, record = IdentifiedCall(call=call), dict[str, Any]()
    if session.is_main:
        _begin(session, output_dir, fence, refused_before)
        _clean_up(session, call)
        identified, record = _identify(session, call, facts.settings, claimed)
        for directory in identified.directories:
            _begin(session, directory, _prepare(session, directory, needed=False))
        _put_back(session, call, identified)
        request = replace(
            request,
            call=identified.call,
            also_search=identified.directories,
            reopened=identified.known is not None and identified.known.reopened,
            in_memory=checkpoint_for(snapshot, identified.call),
        )
    choice = agree(session, request)
    if choice.fence is not None and not session.is_main:
        _record(session, call.output_dir, Path(choice.fence), refused_before)
    continues = choice.in_memory and refused_before is not None
    if continues and snapshot is not None and choice.fence is not None:
        # the run continues from memory: what was taken with it and after it may be published
        _record(session, call.output_dir, Path(choice.fence), snapshot.staged.attempt)
    call = call.model_copy(update={"ordinal": choice.ordinal})
    if snapshot is not None:
        if choice.in_memory:
            choice = replace(choice, snapshot=snapshot)
        else:
            snapshot.close()
    if choice.notice:
        session.warn(choice.notice)
    if session.is_main:
        if choice.reopened and choice.checkpoint is not None and choice.checkpoint.manifest.finished:
            path = choice.checkpoint.path
            # `save_total_limit` counts it again
            mark_finished(path, False, fence=session.fence(output_directory_of(path)))
        _report(session, identified, choice, rejected=session.rejected_checkpoints > rejected_before)
    _announce(session, call, choice)
    guard.claimed.add(choice.ordinal)
    return AgreedResume(call=call, choice=choice, record=record)


def _prepare(session: Session, output_dir: Path, *, needed: bool) -> Path | None:
    """Make the fence of this attempt in an output directory. On rank 0.

    Args:
        needed: also if no earlier attempt has left one.

    Returns:
        None if it has one, needs none, or none can be made.
    """
    run_id = session.config.run_id
    if session.fence(output_dir) is not None or not (needed or fencing.exists(output_dir, run_id)):
        return None
    try:
        return fencing.prepare(output_dir, run_id)
    except OSError as error:
        session.warn(f"{UNFENCED}: {error}")
        return None


def _refused_before(session: Session, output_dir: Path) -> int | None:
    """Return this attempt if the others have begun one without this host: what it has in memory was taken
    before, and its steps were done again, so it is not published. On the rank that records.
    """
    records = session.rank % session.local_world_size == 0 and session.fence(output_dir) is None
    left_out = records and fencing.was_left_out(session.config.run_directory, output_dir)
    return session.settings.attempt if left_out else None


def _begin(session: Session, output_dir: Path, fence: Path | None, refused_before: int | None = None) -> None:
    """End the older attempts in an output directory. On rank 0.

    Args:
        fence: of this attempt if it begins with this call.
        refused_before: as `fencing.record`.
    """
    if fence is None:
        return
    try:
        begin_attempt(fence, output_dir, session.config.run_id)
    except OSError as error:
        session.warn(f"{UNFENCED}: {error}")
    if session.world_size > session.local_world_size:
        _record(session, output_dir, fence, refused_before)
    else:
        fencing.close(fence)  # of an attempt over several hosts, before this one
        for folder in filter(None, (session.config.run_directory, session.config.snapshot_directory)):
            fencing.close_recorded(folder, None)


def _record(session: Session, output_dir: str | Path, fence: Path, refused_before: int | None = None) -> None:
    """Note the fence, also for the supervisor and the drain worker of this host.

    Args:
        refused_before: as `fencing.record`.
    """
    config = session.config
    session.fences[os.path.realpath(output_dir)] = fence
    if session.rank % session.local_world_size == 0:
        for folder in filter(None, (config.run_directory, config.snapshot_directory)):
            fencing.record(
                folder, Path(output_dir), fence, made=session.is_main, refused_before=refused_before
            )


def _clean_up(session: Session, call: TrainCall) -> None:
    """Complete what a writer that was killed has left. On rank 0."""
    # restores the name of a checkpoint whose writer was killed between two renames
    for folder in directories_of_run(session.config.run_id, Path(call.output_dir)):
        clean_partial_directories(folder, fence=session.fence(call.output_dir))


def _claim(session: Session, call: TrainCall) -> None:
    """Claim the output directory. On rank 0.

    Raises:
        UsageError: another run is live in it.
    """
    config = session.config
    if unclaimed := claim(call.output_dir, RunDirectory(path=config.run_directory), config.run_id):
        session.warn(unclaimed)


def _put_back(session: Session, call: TrainCall, identified: IdentifiedCall) -> None:
    """Put back checkpoints that the script has removed before the call. On rank 0."""
    config = session.config
    links = RunDirectory(path=config.run_directory).checkpoint_backups
    for directory in dict.fromkeys((os.path.realpath(call.output_dir), *map(str, identified.directories))):
        fence = session.fence(directory)
        names = checkpoint_backups.put_back(links, config.run_id, directory, fence=fence)
        if names:
            session.warn(checkpoint_backups.put_back_sentence(names, directory))


def _announce(session: Session, call: TrainCall, choice: ResumeChoice) -> None:
    """Say from which checkpoint the call resumes, if it does."""
    if choice.checkpoint is None:
        return
    over = choice.finished and not choice.foreign
    verb = "is already finished; restored from" if over else "resumes from"
    where = str(choice.checkpoint.path)
    if choice.snapshot is not None and choice.in_memory:
        where = f"{path_of(choice.snapshot.staged)}, from memory"
    session.notify(f"{call.title} {verb} {where}")
    if choice.finished and session.is_main:
        session.journal.write(
            TrainRestored(rank=0, step=choice.checkpoint.manifest.step, train_call=call.ordinal)
        )


def _identify(
    session: Session, call: TrainCall, digest: str, claimed: Iterable[int]
) -> tuple[IdentifiedCall, dict[str, Any]]:
    """Recognize the call among those of the run; also return what the journal records of it."""
    settings = session.settings
    directory = CallDirectory(
        path=os.path.realpath(call.output_dir),
        not_before=settings.attempt_started_at,
        not_after=time.time(),
        pid=os.getpid(),
    )
    identified = identify(
        call,
        settings.known_calls,
        claimed,
        settings=digest,
        directory=directory,
        run_id=session.config.run_id,
    )
    record = {
        "trainer_class": call.trainer_class,
        "output_dir": directory.path,
        "settings": digest,
        "replaces": identified.lost.ordinal if identified.lost is not None else 0,
    }
    return identified, record


def _report(session: Session, identified: IdentifiedCall, choice: ResumeChoice, *, rejected: bool) -> None:
    """Report what the call resumes from, and how this differs from what the run has. On rank 0.

    Raises:
        ResumeMismatchError: it differs, and the user requires that it does not.
    """
    call = identified.call
    directory = resumed_directory(choice.argument, call)
    step = 0 if directory is None else (step_of(directory) or 0)
    mismatch = find_mismatch(identified, step=step, rejected=rejected, output_dir=call.output_dir)
    serious = mismatch is not None and mismatch.serious
    session.journal.write(
        ResumeChosen(
            rank=session.rank,
            step=step,
            train_call=call.ordinal,
            trainer_class=call.trainer_class,
            output_dir=call.output_dir,
            path=None if directory is None else str(directory),
            expected_step=identified.known.saved if identified.known is not None else 0,
            in_memory=choice.in_memory,
            mismatch=mismatch.text if mismatch is not None and serious else None,
        )
    )
    if mismatch is not None:
        session.warn(mismatch.text)
        if serious and session.config.require_resume:
            raise ResumeMismatchError(mismatch.text)
    elif identified.moved_from is not None and step:
        session.notify(
            f"{call.output_dir} is the output directory of this attempt; {identified.moved_from} was that of"
            " the last"
        )


def resumed_directory(argument: str | bool | None, call: TrainCall) -> Path | None:
    """Return the checkpoint directory that `train(resume_from_checkpoint=argument)` will load, or None."""
    if isinstance(argument, str):
        return Path(argument)
    if not argument:
        return None
    from transformers.trainer_utils import get_last_checkpoint

    newest = get_last_checkpoint(call.output_dir)
    return Path(newest) if newest else None


@contextmanager
def held_snapshot(guard: AttemptState, choice: ResumeChoice) -> Iterator[None]:
    """Within the block, the chosen checkpoint stays in memory if it is a snapshot there."""
    snapshot = choice.snapshot
    if snapshot is None:
        yield
        return
    with closing(snapshot):
        if guard.snapshots is not None and guard.session.is_main:
            guard.snapshots.last = snapshot.slot, snapshot.staged
        yield
