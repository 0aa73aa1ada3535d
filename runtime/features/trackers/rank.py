"""Trackers in a rank: what opens their runs is watched, so that it continues the run of an earlier attempt.

In a later attempt the same opening, counted from the script's first line among those of its project,
continues that run. What the user names is left alone, as an argument or by a variable, and so is what other
ranks and other processes open. Opens nothing by itself; the arguments of a first attempt are the script's.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import wrapt

from grpo_run.runtime.features.trackers.events import NAME, TrackerRun
from grpo_run.runtime.rank.points import RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.watchdog.observation import RankState

MAX_OPENINGS = 64
"""Of one project, from the start of the script. The limit of one environment variable is 128 KiB
(execve(2))."""
TENSORBOARD = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """A library whose runs are opened by one function.

    Attributes:
        module, function: what opens a run.
        names: arguments by which the user names a run.
        variables: variables by which the user names a run, or says whether one is continued.
        apart: arguments that tell apart the runs of a script and are the same in each attempt.
        attribute: of the returned run; its name.
        argument: by which a run of that name is continued.
        settings: further arguments that this takes, unless the script gives them.
    """

    module: str
    function: str
    names: tuple[str, ...]
    variables: tuple[str, ...] = ()
    apart: tuple[str, ...]
    attribute: str
    argument: str
    settings: Mapping[str, str]


TRACKERS = (
    Tracker(
        module="wandb",
        function="init",
        names=("id", "fork_from", "resume_from"),
        variables=("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_FORK_FROM", "WANDB_RESUME_FROM"),
        apart=("entity", "project", "job_type"),
        attribute="id",
        argument="id",
        settings={"resume": "allow"},
    ),
    Tracker(
        module="trackio",
        function="init",
        names=("name",),
        apart=("project",),
        attribute="name",
        argument="name",
        settings={"resume": "allow"},
    ),
    Tracker(
        module="mlflow",
        function="start_run",
        names=("run_id",),
        variables=("MLFLOW_RUN_ID",),
        apart=("experiment_id", "nested"),
        attribute="info.run_id",
        argument="run_id",
        settings={},
    ),
)


class OpenedRuns:
    """The runs that this rank's trackers open, and those of earlier attempts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: Mapping[str, str] = session.settings.features.get(NAME, {})
        self._counted: Counter[str] = Counter()

    def next_opening(self, tracker: str, *apart: object) -> str | None:
        """Return what identifies the run that is about to be opened; None if it is opened within a step.

        After a recovery fewer steps are taken than before, so what is opened in them cannot be counted.
        """
        if not self._session.is_rank or self._session.slot.state is RankState.training:
            return None
        project = "/".join([tracker, *map(str, apart)])
        self._counted[project] += 1
        return f"{project}#{self._counted[project]}" if self._counted[project] <= MAX_OPENINGS else None

    def known(self, opening: str | None) -> str | None:
        """Return the name that the run of an opening has; None if it is opened for the first time."""
        return None if opening is None else self._known.get(opening)

    def record(self, opening: str | None, name: str) -> None:
        """Journal the name of a run that was opened."""
        if opening is not None and self._known.get(opening) != name:
            self._session.journal.write(TrackerRun(rank=0, opening=opening, name=name))

    def open(
        self, tracker: Tracker, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call what opens a run of a tracker, so that it continues the run of this opening if there is one.

        A run that cannot be continued, for example because the user has deleted it, is opened anew.
        """
        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # raises it
        given = {name: value for name, value in given.items() if value is not None}
        if given.keys() & set(tracker.names) or any(os.environ.get(name) for name in tracker.variables):
            return original(*args, **kwargs)
        opening = self.next_opening(tracker.module, *(given.get(name, "") for name in tracker.apart))
        if (known := self.known(opening)) is not None:
            settings = {name: value for name, value in tracker.settings.items() if name not in given}
            try:
                return original(*args, **{**kwargs, **settings, tracker.argument: known})
            except Exception as error:  # noqa: BLE001 - a tracker must not end a run that it did not end before
                self._session.warn(
                    f"{tracker.module} could not continue its run {known} ({type(error).__name__}: {error});"
                    " it opens a new one"
                )
        run = original(*args, **kwargs)
        try:
            self.record(opening, str(attrgetter(tracker.attribute)(run)))
        except AttributeError as error:
            self._session.warn(f"{tracker.module} will open a new run after a restart: {error}")
        return run

    def watch_tensorboard(self, module: Any) -> None:
        """Watch what transformers' TensorBoard callback opens."""
        original = module.TensorBoardCallback.on_train_begin

        @functools.wraps(original)
        def on_train_begin(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            opening = self.begin_tensorboard(callback, state)
            returned = original(callback, args, state, control, **kwargs)
            if opening is not None:
                self.record(opening, os.path.abspath(callback.logging_dir))
            return returned

        module.TensorBoardCallback.on_train_begin = on_train_begin

    def begin_tensorboard(self, callback: Any, state: Any) -> str | None:
        """Give transformers' TensorBoard callback the folder of this opening, unless the user has named one.

        Values of steps that are repeated replace the first ones: the new file tells readers to drop these.
        Return the opening; None if there is nothing to record.
        """
        named = callback.logging_dir is not None or callback.tb_writer is not None
        if named or not state.is_world_process_zero or state.is_hyper_param_search:
            return None
        opening = self.next_opening(TENSORBOARD)
        if (known := self.known(opening)) is not None and os.path.isdir(known):
            goes_on = state.global_step < state.max_steps
            callback.logging_dir = known
            callback.tb_writer = getattr(callback, trainer_names.SUMMARY_WRITER)(
                log_dir=known, purge_step=state.global_step + 1 if goes_on else None
            )
        return opening


class TrackersPart(RankFeature):
    """Trackers at the points of a rank."""

    name = NAME

    def script_begins(self, session: Session) -> None:
        """Watch what trackers open on rank 0, as soon as the script has imported them."""
        if not session.is_main:
            return
        runs = OpenedRuns(session)

        def watch(tracker: Tracker, module: Any) -> None:
            original = getattr(module, tracker.function, None)
            if original is None:
                return  # a folder of that name, for example of the files that wandb writes

            @functools.wraps(original)
            def opened(*args: Any, **kwargs: Any) -> Any:
                return runs.open(tracker, original, args, kwargs)

            setattr(module, tracker.function, opened)

        for tracker in TRACKERS:
            wrapt.register_post_import_hook(functools.partial(watch, tracker), tracker.module)
        wrapt.register_post_import_hook(runs.watch_tensorboard, "transformers.integrations.integration_utils")


PART = TrackersPart()
