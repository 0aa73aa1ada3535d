"""A run that a tracker opened in an earlier attempt is continued; what the user names is left alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.journal import as_event

from grpo_run.runtime.features.trackers import rank
from grpo_run.runtime.features.trackers.events import PART as HISTORY
from grpo_run.runtime.features.trackers.rank import MAX_OPENINGS, PART, TRACKERS, OpenedRuns, Tracker
from grpo_run.runtime.history.history import History
from grpo_run.runtime.upstream import trainer_names
from grpo_run.watchdog.observation import RankState

Events = Callable[[], list[dict[str, Any]]]
Attempt = Callable[[], OpenedRuns]

WANDB, TRACKIO, MLFLOW = TRACKERS


class Opening:
    """What opens runs of a tracker: names them by itself, and refuses to continue those that are gone."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.calls: list[dict[str, Any]] = []
        self.gone: set[str] = set()

    def __call__(
        self, project: str | None = None, job_type: str | None = None, id: str | None = None,
        name: str | None = None, run_id: str | None = None, resume: str | None = None,
    ) -> Any:  # fmt: skip
        """Open a run."""
        given = {"id": id, "name": name, "run_id": run_id}
        self.calls.append({"project": project, "resume": resume, **given})
        chosen = given[self.tracker.argument]
        if chosen in self.gone:
            raise RuntimeError("it was deleted")
        chosen = chosen or f"new-{len(self.calls)}"
        return SimpleNamespace(id=chosen, name=chosen, info=SimpleNamespace(run_id=chosen))


@pytest.fixture
def attempt(session: Any, events: Events) -> Attempt:
    """Begin the next attempt, which knows what the journal has."""

    def begin() -> OpenedRuns:
        history = History(parts=(HISTORY(),))
        for record in events():
            history.apply(as_event(record, history.decoder))
        told = {PART.name: history.part(HISTORY).names}
        session.settings = session.settings.model_copy(update={"features": told})
        return OpenedRuns(session)

    return begin


def opened(runs: OpenedRuns, opening: Opening, **arguments: Any) -> str:
    """Open a run and return its name."""
    run = runs.open(opening.tracker, opening, (), arguments)
    return str(run.id)


@pytest.mark.parametrize("tracker", TRACKERS, ids=lambda tracker: tracker.module)
def test_each_run_of_a_script_goes_on_in_later_attempts(tracker: Tracker, attempt: Attempt) -> None:
    """The first attempt changes no argument; a run that the first attempt did not reach is new."""
    opening = Opening(tracker)
    runs = attempt()
    assert [opened(runs, opening), opened(runs, opening)] == ["new-1", "new-2"]
    assert all(set(call.values()) == {None} for call in opening.calls)
    runs = attempt()
    assert [opened(runs, opening) for _ in range(3)] == ["new-1", "new-2", "new-5"]
    assert opening.calls[2]["resume"] == tracker.settings.get("resume")
    runs = attempt()
    assert [opened(runs, opening) for _ in range(3)] == ["new-1", "new-2", "new-5"]


def test_a_run_that_only_one_attempt_opens_does_not_shift_those_of_another_kind(attempt: Attempt) -> None:
    """A script that prepares its data once opens a run for that, once."""
    opening = Opening(WANDB)
    runs = attempt()
    assert opened(runs, opening, job_type="data") == "new-1"
    assert opened(runs, opening, job_type="train") == "new-2"
    assert opened(attempt(), opening, job_type="train") == "new-2"


@pytest.mark.parametrize(
    ("tracker", "arguments"),
    [(WANDB, {"id": "mine"}), (TRACKIO, {"name": "mine"}), (MLFLOW, {"run_id": "mine"})],
)
def test_a_run_that_the_user_names_is_left_alone(
    tracker: Tracker, arguments: dict[str, str], attempt: Attempt, events: Events
) -> None:
    """Nothing is recorded, and it does not count."""
    opening = Opening(tracker)
    assert opened(attempt(), opening, **arguments) == "mine"
    assert events() == []
    assert opening.calls[0]["resume"] is None


@pytest.mark.parametrize("variable", [*WANDB.variables, *MLFLOW.variables])
def test_a_variable_of_the_tracker_wins(
    variable: str, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker reads it."""
    opening = Opening(WANDB if variable.startswith("WANDB") else MLFLOW)
    opened(attempt(), opening)
    monkeypatch.setenv(variable, "mine")
    assert opened(attempt(), opening) == "new-2"


def test_whether_runs_are_continued_can_be_said_in_the_script(attempt: Attempt) -> None:
    """wandb and trackio have an argument for it."""
    opening = Opening(TRACKIO)
    opened(attempt(), opening)
    opened(attempt(), opening, resume="never")
    assert opening.calls[1]["resume"] == "never"


def test_a_run_opened_in_a_step_is_left_alone(session: Any, attempt: Attempt) -> None:
    """A recovery repeats some steps, so an evaluation's run has another number then."""
    opening = Opening(WANDB)
    runs = attempt()
    session.slot.state = RankState.training
    assert opened(runs, opening) == "new-1"
    session.slot.state = RankState.between
    assert opened(runs, opening) == "new-2"
    assert opened(attempt(), opening) == "new-2"


def test_a_run_that_cannot_be_continued_is_opened_anew(session: Any, attempt: Attempt) -> None:
    """It takes the place of the one that is gone."""
    opening = Opening(MLFLOW)
    opened(attempt(), opening)
    opening.gone.add("new-1")
    assert opened(attempt(), opening) == "new-3"
    assert session.notified == [
        "mlflow could not continue its run new-1 (RuntimeError: it was deleted); it opens a new one"
    ]
    assert opened(attempt(), opening) == "new-3"


def test_what_the_tracker_refuses_is_its_own_error(attempt: Attempt) -> None:
    """An argument that it does not know, and a run without a name."""
    opening = Opening(WANDB)
    with pytest.raises(TypeError, match="mood"):
        opened(attempt(), opening, mood="good")
    assert attempt().open(WANDB, lambda: None, (), {}) is None


def test_a_script_that_opens_very_many_runs_is_bounded(attempt: Attempt, events: Events) -> None:
    """The names travel in one environment variable."""
    runs, opening = attempt(), Opening(WANDB)
    for _ in range(MAX_OPENINGS + 1):
        opened(runs, opening)
    assert len(events()) == MAX_OPENINGS


def test_only_rank_0_is_watched(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose ranks each open a run has as many runs as under torchrun."""
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(
        rank.wrapt, "register_post_import_hook", lambda hook, name: hooks.setdefault(name, hook)
    )
    session.is_main = False
    PART.script_begins(session)
    assert hooks == {}
    session.is_main = True
    PART.script_begins(session)
    module: Any = ModuleType("wandb")
    hooks["wandb"](module)
    assert not hasattr(module, "init"), "a folder of that name"
    module.init = lambda **_: SimpleNamespace(id="first")
    hooks["wandb"](module)
    assert module.init(project="sums").id == "first"


class Callback:
    """What the hooks use of transformers' TensorBoard callback."""

    def __init__(self, folder: Path, logging_dir: str | None = None, tb_writer: Any = None) -> None:
        self.folder, self.logging_dir, self.tb_writer = folder, logging_dir, tb_writer

    def _SummaryWriter(self, log_dir: str, purge_step: int | None) -> Any:
        return SimpleNamespace(log_dir=log_dir, purge_step=purge_step)


def state(step: int = 0, **changes: Any) -> Any:
    """Return the state of a trainer."""
    usual = {"max_steps": 9, "is_world_process_zero": True, "is_hyper_param_search": False}
    return SimpleNamespace(global_step=step, **(usual | changes))


def test_tensorboard_keeps_its_folder(attempt: Attempt, tmp_path: Path) -> None:
    """Readers drop the values of the steps that are repeated, and none of a call that was finished."""
    runs, first = attempt(), Callback(tmp_path)
    opening = runs.begin_tensorboard(first, state())
    assert (first.logging_dir, first.tb_writer) == (None, None)
    runs.record(opening, str(tmp_path))
    again = Callback(tmp_path)
    assert attempt().begin_tensorboard(again, state(4)) == opening
    assert (again.logging_dir, again.tb_writer.log_dir, again.tb_writer.purge_step) == (
        str(tmp_path), str(tmp_path), 5,
    )  # fmt: skip
    finished = Callback(tmp_path)
    attempt().begin_tensorboard(finished, state(9))
    assert finished.tb_writer.purge_step is None


def test_a_folder_of_tensorboard_that_is_gone_is_named_anew(attempt: Attempt, tmp_path: Path) -> None:
    """As at a first start."""
    runs, callback = attempt(), Callback(tmp_path)
    opening = runs.begin_tensorboard(callback, state())
    runs.record(opening, str(tmp_path / "gone"))
    assert attempt().begin_tensorboard(callback, state(4)) == opening
    assert callback.logging_dir is None


@pytest.mark.parametrize(
    ("callback", "changes"),
    [
        ({"logging_dir": "mine"}, {}),
        ({"tb_writer": "mine"}, {}),
        ({}, {"is_world_process_zero": False}),
        ({}, {"is_hyper_param_search": True}),
    ],
)
def test_a_folder_or_writer_of_the_user_is_left_alone(
    callback: dict[str, Any], changes: dict[str, Any], attempt: Attempt, tmp_path: Path
) -> None:
    """Also the folders of trials."""
    assert attempt().begin_tensorboard(Callback(tmp_path, **callback), state(**changes)) is None


def test_the_libraries_have_what_is_used() -> None:
    """wandb and MLflow are not installed."""
    import trackio
    from transformers.integrations.integration_utils import TensorBoardCallback

    assert {"project", "name", "resume"} <= inspect.signature(trackio.init).parameters.keys()
    attributes = vars(TensorBoardCallback())
    assert {trainer_names.SUMMARY_WRITER, "logging_dir", "tb_writer"} <= attributes.keys()
