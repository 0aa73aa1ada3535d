"""A checkpoint goes to memory or directly to disk; either way it is whole, verified, and older ones go only after it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.identities import identity
from transformers import TrainerCallback

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall, read_manifest, write_manifest
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.drain import handle_request
from grpo_run.runtime.staging.drain_messages import DrainPublished, DrainRequest
from grpo_run.trainers.saving import saver
from grpo_run.trainers.saving import snapshots as snapshot_module
from grpo_run.trainers.saving.cadence import Cadence
from grpo_run.trainers.saving.save_mode import UPLOADS
from grpo_run.trainers.saving.saver import Saver
from grpo_run.trainers.saving.snapshots import Snapshots
from grpo_run.watchdog.observation import Phase, Slot

Events = Callable[[], list[dict[str, Any]]]


class Trainer:
    """Writes checkpoints as transformers' does, and calls what it calls after a step."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(
            output_dir=str(output), save_total_limit=None, save_only_model=False, should_save=True,
            push_to_hub=False, metric_for_best_model=None, save_strategy="steps",
            per_device_train_batch_size=4, gradient_accumulation_steps=2,
        )  # fmt: skip
        self.control = SimpleNamespace(should_training_stop=False)
        self.state = SimpleNamespace(global_step=5, max_steps=1000, best_model_checkpoint=None)
        self.model = torch.nn.Linear(4, 2)
        self.model_wrapped = object()
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.should_save = False
        self.seen: list[Any] = []
        self.cards = 0
        self.during: Callable[[Path], None] = lambda path: None

    def _get_output_dir(self, trial: Any = None) -> str:
        """The script's."""
        return str(self.args.output_dir)

    def create_model_card(self) -> None:
        """As TRL's, whose checkpoint method calls it."""
        self.cards += 1

    def _save_checkpoint(self, model: Any, trial: Any) -> str:
        """Write."""
        path = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        self.create_model_card()
        torch.save({"weight": self.model.weight.detach()}, path / "weights.pt")
        (path / "trainer_state.json").write_text(f'{{"global_step": {self.state.global_step}}}')
        self.seen.append((model, trial, self.args.save_total_limit))
        self.during(path)
        return "what the method returns"

    def _maybe_log_save_evaluate(self, *args: Any) -> str:
        """After a step."""
        if self.should_save:
            self._save_checkpoint("model", None)
        return "what that returns"


class RecordingCadence(Cadence):
    """Schedules nothing by itself and records the snapshots that were taken."""

    def __init__(self, taken: list[tuple[int, float]]) -> None:
        super().__init__(0, failure_seconds=1.0, notify=lambda *arguments: None, clock=lambda: 0.0)
        self.record = taken

    def taken(self, step: int, cost_seconds: float) -> None:
        """Record the step and the cost."""
        self.record.append((step, cost_seconds))


class Guarded:
    """A trainer whose saves are the guard's, and what it was told and asked."""

    def __init__(
        self, trainer: Trainer, session: Any, call: TrainCall, snapshots: Snapshots | None = None
    ) -> None:
        self.trainer = trainer
        self.session = session
        self.given_snapshots = snapshots
        self.order: list[str] = []
        self.exact: list[Path] = []
        self.taken: list[tuple[int, float]] = []
        exact: Any = SimpleNamespace(save=self._save_exact)
        self.saver = Saver(
            trainer,
            session,
            call,
            snapshots=snapshots,
            collect_vote=lambda: self.order.append("agree"),
            exact=exact,
        )
        self.saver.cadence = RecordingCadence(self.taken)
        self.hooks = ExitStack()
        self.hooks.enter_context(self.saver.installed())

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots it was given."""
        assert self.given_snapshots is not None
        return self.given_snapshots

    def _save_exact(self, folder: Path) -> None:
        self.exact.append(folder)
        self.order.append("exact")
        (folder / "exact.json").write_text("{}")

    def save(self, step: int) -> Path:
        """The script saves at `step`."""
        self.trainer.state.global_step = step
        self.trainer._save_checkpoint("model", None)
        return Path(self.trainer.args.output_dir) / f"checkpoint-{step}"

    def step(self, step: int, *, due: bool = True, scheduled: bool = False) -> None:
        """A step has been made; a snapshot may be due after it."""
        self.trainer.state.global_step = step
        self.saver.cadence.decide(step, agreed=due)
        self.trainer.should_save = scheduled
        assert self.trainer._maybe_log_save_evaluate(0.5) == "what that returns"

    @property
    def staged(self) -> list[tuple[int, bool]]:
        """Step of each snapshot in memory, newest first, and whether the script asked for it."""
        return [(staged.step, staged.scheduled) for staged, _ in self.snapshots.staging.snapshots()]

    def drain(self) -> Path:
        """The supervisor makes the newest durable."""
        staging = self.snapshots.staging
        answered = handle_request(
            staging, DrainRequest(slot=staging.snapshots()[0][1].index), lambda written: None
        )
        assert isinstance(answered, DrainPublished), answered
        return Path(answered.path)

    def spoil(self) -> None:
        """A weight is no number any more."""
        with torch.no_grad():
            self.trainer.model.weight[0, 0] = float("nan")


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that do not change, and no uploads in this environment."""
    monkeypatch.setattr(saver, "_versions", lambda: {"torch": "2.13.0"})
    for name in UPLOADS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


@pytest.fixture
def direct(tmp_path: Path, session: Any, call: TrainCall) -> Guarded:
    """Without a file system in memory."""
    return Guarded(Trainer(tmp_path / "out"), session, call)


@pytest.fixture
def staged(tmp_path: Path, session: Any, call: TrainCall) -> Iterator[Guarded]:
    """The usual way."""
    snapshots = Snapshots(session, StagingArea(tmp_path / "memory"))
    yield Guarded(Trainer(tmp_path / "out"), session, call, snapshots)
    snapshots.close()


@pytest.fixture(params=["direct", "staged"])
def either(request: pytest.FixtureRequest) -> Guarded:
    """Both ways in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What happens while a rank waits, one at each poll, instead of any real waiting."""
    script: list[Callable[[], Any]] = []

    def sleep(seconds: float) -> None:
        assert script, "it waits for something that nobody will do"
        script.pop(0)()

    time = SimpleNamespace(sleep=sleep, monotonic=lambda: 100.0, perf_counter=lambda: 100.0)
    monkeypatch.setattr(snapshot_module, "time", time)
    return script


def memory_warnings(guarded: Guarded) -> list[int]:
    """Return the steps at which the user was warned that memory is too small for a snapshot."""
    found = [re.match(r"no memory for a snapshot at step (\d+):", text) for text in guarded.session.notified]
    return [int(match[1]) for match in found if match]


def named(events: Events, name: str) -> list[dict[str, Any]]:
    """Journal records of that name."""
    return [record for record in events() if record["event"] == name]


# ---- directly ----


def test_a_saved_checkpoint_is_published(direct: Guarded, call: TrainCall, events: Events) -> None:
    """With a manifest that holds, and a line in the journal."""
    path = direct.save(5)
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    assert (manifest.run_id, manifest.step, manifest.world_size, manifest.train_call) == ("run-1", 5, 1, call)
    assert (manifest.global_batch, manifest.layout) == (8, "ddp")
    assert manifest.scheduled
    assert {"weights.pt", "trainer_state.json", "exact.json"} == set(manifest.files)
    (record,) = named(events, "checkpoint_published")
    assert (record["step"], record["path"], record["verified"]) == (5, str(path.resolve()), True)
    assert (record["durable"], record["scheduled"], record["train_call"]) == (True, True, 1)
    assert record["size_bytes"] == sum(entry.size for entry in manifest.files.values())


def test_the_trainers_own_method_gets_and_returns_the_same(direct: Guarded) -> None:
    """Nothing is looked into."""
    assert direct.trainer._save_checkpoint("model", None) == "what the method returns"
    assert direct.trainer.seen == [("model", None, None)]


def test_a_checkpoint_being_written_again_is_none(direct: Guarded) -> None:
    """A kill in the middle must not leave an old manifest over new bytes."""
    path = direct.save(5)
    found: list[bool] = []
    direct.trainer.during = lambda path: found.append((path / MANIFEST).exists())
    direct.save(5)
    assert found == [False]
    assert (path / MANIFEST).exists()


def test_old_checkpoints_go_only_when_the_new_one_is_complete(direct: Guarded) -> None:
    """The trainer itself is not let to rotate; afterwards the limit holds."""
    first = direct.save(5)
    direct.trainer.args.save_total_limit = 1
    there: list[bool] = []
    direct.trainer.during = lambda path: there.append(first.exists())
    second = direct.save(10)
    assert there == [True]
    assert direct.trainer.seen[-1][2] is None
    assert not first.exists()
    assert read_manifest(second).step == 10


def test_the_best_checkpoint_stays(direct: Guarded) -> None:
    """As the trainer's state names it."""
    best = direct.save(5)
    direct.save(6)
    direct.trainer.args.save_total_limit = 1
    direct.trainer.state.best_model_checkpoint = str(best)
    direct.save(10)
    assert sorted(path.name for path in best.parent.iterdir()) == ["checkpoint-10", "checkpoint-5"]


def test_nothing_is_published_before_all_ranks_have_written(
    direct: Guarded, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest comes after the barrier."""
    path = Path(direct.trainer.args.output_dir) / "checkpoint-5"
    at_barrier: list[tuple[bool, bool]] = []

    def maximum(value: int) -> int:
        at_barrier.append(((path / "exact.json").exists(), (path / MANIFEST).exists()))
        return value

    monkeypatch.setattr(session.votes, "maximum", maximum)
    direct.save(5)
    assert at_barrier[-1] == (True, False)


def test_only_the_main_rank_publishes(direct: Guarded, session: Any, events: Events) -> None:
    """The others have written their part."""
    session.is_main = False
    path = direct.save(5)
    assert (path / "weights.pt").exists()
    assert not (path / MANIFEST).exists()
    assert events() == []


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the disk says is free; the last entry counts."""
    free = [1 << 40]
    monkeypatch.setattr(
        saver.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[-1], total=1 << 41, used=0)
    )
    return free


def test_without_room_for_another_nothing_is_begun(
    direct: Guarded, session: Any, events: Events, free_bytes: list[int]
) -> None:
    """It is an alert each time and said once; the next one is saved when there is room."""
    older = direct.save(5)
    (published,) = named(events, "checkpoint_published")
    free_bytes.append(published["size_bytes"] - 1)
    for step in (6, 7):
        assert not direct.save(step).exists()
    assert len(direct.trainer.seen) == 1
    assert [(event["step"], event["cause"]) for event in named(events, "checkpoint_failed")] == [
        (6, "disk_full"), (7, "disk_full"),
    ]  # fmt: skip
    assert len([text for text in session.notified if "is not saved" in text]) == 1
    verify_digests(older, read_manifest(older).files)
    free_bytes.append(published["size_bytes"])
    assert read_manifest(direct.save(8)).step == 8


def test_all_ranks_take_rank_0s_word_for_the_disk(
    direct: Guarded, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others ask no disk: theirs may be another, and one that began alone would wait for ever."""
    direct.save(5)
    session.is_main = False
    monkeypatch.setattr(saver.shutil, "disk_usage", None)
    asked: list[int] = []

    def maximum(value: int) -> int:
        asked.append(value)
        return (
            1 if len(asked) == 3 else value
        )  # whether weights are finite, who reads it, whether the disk is short

    monkeypatch.setattr(session.votes, "maximum", maximum)
    assert not direct.save(6).exists()


def test_the_first_checkpoint_is_tried_and_the_last(direct: Guarded, free_bytes: list[int]) -> None:
    """What the first takes nobody knows, and an error in the evening is heard; the last is what the run was for."""
    free_bytes.append(0)
    assert direct.save(5).exists()
    assert not direct.save(6).exists()
    direct.trainer.control.should_training_stop = True
    assert direct.save(7).exists()


def test_what_an_attempt_before_saved_tells_how_much_room_is_needed(
    direct: Guarded, session: Any, call: TrainCall, free_bytes: list[int]
) -> None:
    """Else each attempt's first save would be tried on a full disk, and fail, until the run is given up."""
    direct.save(5)
    again = Guarded(Trainer(Path(call.output_dir)), session, call)
    free_bytes.append(0)
    assert not again.save(6).exists()
    session.config = replace(session.config, run_id="another")
    assert Guarded(Trainer(Path(call.output_dir)), session, call).save(7).exists()


def test_a_disk_that_does_not_say_is_tried(direct: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for rank 0's answer."""
    direct.save(5)

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(saver.shutil, "disk_usage", stale)
    assert direct.save(6).exists()


def test_the_best_that_a_save_has_just_found_counts_at_once(direct: Guarded) -> None:
    """The trainer compares within its save, before it would rotate."""
    older = direct.save(5)
    direct.trainer.args.save_total_limit = 1
    direct.trainer.state.best_model_checkpoint = str(older)

    def better(path: Path) -> None:
        direct.trainer.state.best_model_checkpoint = str(path)

    direct.trainer.during = better
    newest = direct.save(10)
    assert [path.name for path in newest.parent.iterdir()] == ["checkpoint-10"]


def test_a_full_disk_costs_the_model_card_not_the_save(either: Guarded, events: Events) -> None:
    """Rank 0 alone writes it, in the midst of a save in which the others wait for it."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    either.trainer.create_model_card = full  # type: ignore[method-assign]
    either.save(5)
    assert "no model card" in named(events, "warning")[0]["text"]
    assert named(events, "checkpoint_published") or either.staged == [(5, True)]
    assert either.trainer.create_model_card is full


def test_another_error_of_the_model_card_is_the_scripts(either: Guarded) -> None:
    """As it is without us."""

    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    either.trainer.create_model_card = refuse  # type: ignore[method-assign]
    with pytest.raises(PermissionError):
        either.save(5)


# ---- either way ----


def test_the_vote_under_way_is_read_before_saving(either: Guarded) -> None:
    """Ranks save after agreeing; and the group is free for what they agree on while they save."""
    either.trainer.during = lambda path: either.order.append("write")
    either.save(5)
    assert either.order == ["agree", "write", "exact"]


def test_a_save_that_failed_publishes_nothing(either: Guarded, events: Events) -> None:
    """The exception passes; the arguments are what they were."""
    either.trainer.args.save_total_limit = 3
    either.trainer.args.save_only_model = True

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    either.trainer.during = fail
    with pytest.raises(PermissionError):
        either.save(5)
    assert list(find_checkpoints(Path(either.trainer.args.output_dir))) == []
    assert named(events, "checkpoint_published") == named(events, "checkpoint_staged") == []
    assert either.trainer.args.save_total_limit == 3
    assert either.trainer.args.save_only_model is True
    if either.given_snapshots is not None:
        assert either.staged == []


def test_the_phase_is_closed_after_a_failed_save(either: Guarded, reading: Callable[[], Slot]) -> None:
    """A rank that goes on after it (some scripts do) is not in `checkpoint` for ever."""
    either.trainer.during = lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    with pytest.raises(PermissionError):
        either.save(5)
    assert Phase.checkpoint not in [entry.phase for entry in reading().phases]


def test_saving_is_shown(either: Guarded, session: Any, reading: Callable[[], Slot]) -> None:
    """The phase while it lasts, the step and the time afterwards."""
    during: list[Phase | None] = []
    either.trainer.during = lambda path: during.append(reading().phase)
    either.save(5)
    session.slot.publish()
    assert during == [Phase.checkpoint]
    assert reading().checkpoint_step == 5
    assert reading().phases == ()


def test_a_checkpoint_is_whole_although_the_script_wants_the_model_only(either: Guarded) -> None:
    """`save_only_model` is off while the method runs, and as the script had it afterwards."""
    either.trainer.args.save_only_model = True
    during: list[bool] = []
    either.trainer.during = lambda path: during.append(either.trainer.args.save_only_model)
    either.save(5)
    assert during == [False]
    assert either.trainer.args.save_only_model is True


def test_weights_that_are_no_numbers_are_not_saved(either: Guarded, events: Events) -> None:
    """Said and written once a step; what was saved before stays."""
    either.save(4)
    either.spoil()
    either.trainer.seen.clear()
    path = either.save(5)
    either.save(5)
    assert either.trainer.seen == []
    assert not path.exists()
    (record,) = named(events, "checkpoint_rejected")
    assert (record["step"], record["cause"], record["path"]) == (5, "nonfinite", str(path))
    assert len(either.session.notified) == 1
    either.save(6)
    assert len(named(events, "checkpoint_rejected")) == 2


def test_all_ranks_refuse_what_one_must(
    either: Guarded, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of the weights is not theirs; half a checkpoint would be saved, or a collective left alone."""
    monkeypatch.setattr(session.votes, "maximum", lambda value: 1)
    either.save(5)
    assert either.trainer.seen == []


def test_a_disk_that_will_be_full_is_told_at_the_start(
    tmp_path: Path, session: Any, call: TrainCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a night is lost; enough room is nothing to speak of."""
    one = 3 * 10 * 4  # a layer of 10 trained float32 numbers
    for free, said in ((3 * one - 1, 1), (3 * one, 0)):
        session.notified.clear()
        monkeypatch.setattr(saver.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        trainer = Trainer(tmp_path / "out")
        trainer.args.save_total_limit = 2
        Guarded(trainer, session, call)
        assert len(session.notified) == said


# ---- in memory ----


def test_a_save_goes_to_memory_and_becomes_the_same_on_disk(
    staged: Guarded, call: TrainCall, events: Events
) -> None:
    """Training waits for the copy alone; the manifest says what a direct save's would."""
    staged.trainer.args.save_total_limit = 3
    path = staged.save(5)
    assert not path.exists()
    assert staged.staged == [(5, True)]
    (record,) = named(events, "checkpoint_staged")
    assert (record["step"], record["scheduled"], record["train_call"]) == (5, True, 1)
    assert named(events, "checkpoint_published") == []
    ((entry, _),) = staged.snapshots.staging.snapshots()
    assert (entry.limit, entry.attempt, entry.run_id) == (3, 0, "run-1")
    assert staged.drain() == path
    manifest = read_manifest(path)
    verify_digests(path, manifest.files)
    assert {"weights.pt", "trainer_state.json", "exact.json"} == set(manifest.files)
    assert (manifest.train_call, manifest.global_batch, manifest.scheduled) == (call, 8, True)
    assert torch.equal(torch.load(path / "weights.pt")["weight"], staged.trainer.model.weight)
    assert staged.taken == [(5, staged.snapshots.cost_seconds)]


def test_a_relative_directory_is_where_the_script_ran(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drainer runs elsewhere, and scripts change their directory."""
    monkeypatch.chdir(tmp_path)
    snapshots = Snapshots(session, StagingArea(tmp_path / "memory"))
    call = TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir="out")
    guarded = Guarded(Trainer(Path("out")), session, call, snapshots)
    guarded.save(5)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert guarded.drain() == tmp_path / "out" / "checkpoint-5"
    snapshots.close()


def test_without_room_in_memory_it_is_saved_directly(
    staged: Guarded, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And said; nobody is told of a snapshot."""
    staged.snapshots.staging.slots[0].buffer_path(0).symlink_to("nowhere")
    path = staged.save(5)
    verify_digests(path, read_manifest(path).files)
    assert staged.staged == []
    assert memory_warnings(staged) == [5]
    assert staged.taken == []
    assert len(named(events, "checkpoint_published")) == 1
    assert staged.saver.saved_step == 5


@pytest.mark.parametrize("setting", [{"push_to_hub": True}, {"metric_for_best_model": "reward"}])
def test_what_is_read_while_it_is_saved_is_saved_directly(staged: Guarded, setting: dict[str, Any]) -> None:
    """The trainer's own method uploads it, or looks whether the best one is there."""
    vars(staged.trainer.args).update(setting)
    path = staged.save(5)
    assert read_manifest(path).step == 5
    assert staged.staged == []


class Copies(TrainerCallback):  # type: ignore[misc]
    """A script's callback that reads what was saved."""

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Copy it."""


class Looks(TrainerCallback):  # type: ignore[misc]
    """A script's callback that has nothing to do with saving."""


class Theirs(TrainerCallback):  # type: ignore[misc]
    """As transformers' own that upload when a variable says so."""

    __module__ = "transformers.integrations.integration_utils"

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Upload it, if that was asked for."""


Theirs.__name__ = "WandbCallback"


def test_a_script_that_reads_what_was_saved_finds_it_on_disk(
    staged: Guarded, polls: list[Callable[[], Any]]
) -> None:
    """The save returns when it is durable."""
    staged.trainer.callback_handler.callbacks = [Looks(), Copies()]
    polls += [lambda: None, staged.drain, lambda: None]
    path = staged.save(5)
    verify_digests(path, read_manifest(path).files)
    assert len(staged.trainer.seen) == 1


@pytest.mark.parametrize("callbacks", [[], [Looks()], [Theirs()], [Looks(), Theirs()]])
def test_nobody_waits_for_a_disk_that_nobody_reads(
    staged: Guarded, polls: list[Callable[[], Any]], callbacks: list[Any]
) -> None:
    """A poll would fail the test."""
    staged.trainer.callback_handler.callbacks = callbacks
    staged.save(5)
    assert staged.staged == [(5, True)]


@pytest.mark.parametrize(
    ("value", "waits"), [("checkpoint", True), ("1", True), ("false", False), ("", False)]
)
def test_an_upload_by_a_variable_is_waited_for(
    staged: Guarded,
    polls: list[Callable[[], Any]],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    waits: bool,
) -> None:
    """Transformers' own callbacks read the directory then."""
    monkeypatch.setenv("WANDB_LOG_MODEL", value)
    staged.trainer.callback_handler.callbacks = [Theirs()]
    polls += [staged.drain, lambda: None] if waits else []
    path = staged.save(5)
    assert path.exists() is waits


# ---- snapshots of our own ----


def test_a_snapshot_is_taken_when_it_is_due(staged: Guarded, events: Events) -> None:
    """In memory only, marked as nobody's wish; the trainer's method is called as ever."""
    staged.step(4, due=False)
    assert staged.staged == []
    staged.step(5)
    assert staged.staged == [(5, False)]
    assert staged.trainer.seen == [(staged.trainer.model_wrapped, None, None)]
    assert staged.order == ["agree", "exact"]
    assert named(events, "checkpoint_staged")[0]["scheduled"] is False
    assert [step for step, _ in staged.taken] == [5]
    path = staged.drain()
    assert not read_manifest(path).scheduled


def test_a_step_that_was_saved_needs_no_snapshot(staged: Guarded) -> None:
    """Neither after the script's own save nor twice (an epoch's end is after its last step)."""
    staged.step(5, scheduled=True)
    assert staged.staged == [(5, True)]
    staged.step(6)
    staged.step(6)
    assert staged.staged == [(6, False), (5, True)]
    assert len(staged.trainer.seen) == 2


def test_a_step_saved_directly_needs_no_snapshot(staged: Guarded) -> None:
    """It is on disk."""
    staged.trainer.args.metric_for_best_model = "reward"
    staged.step(5, scheduled=True)
    assert staged.staged == []
    assert len(staged.trainer.seen) == 1


def test_a_snapshot_without_room_is_no_checkpoint(staged: Guarded, tmp_path: Path) -> None:
    """It is done without, and said."""
    for slot in staged.snapshots.staging.slots:
        slot.buffer_path(0).symlink_to("nowhere")
    staged.step(5)
    assert staged.staged == []
    assert not (tmp_path / "out").exists()
    assert memory_warnings(staged) == [5]
    assert staged.taken == []
    assert staged.saver.saved_step == -1


def test_memory_is_tried_again_after_a_while(staged: Guarded) -> None:
    """A copy that is given up costs as much as one that is not, so not at every step; but a shortage may pass."""
    link = staged.snapshots.staging.slots[0].buffer_path(0)
    link.symlink_to("nowhere")
    staged.step(5)
    link.unlink()
    staged.step(6)
    staged.step(7, scheduled=True)
    assert staged.staged == []
    assert len(staged.trainer.seen) == 1, "written directly"
    staged.step(5 + saver.RETRY_STEPS)
    assert staged.staged == [(5 + saver.RETRY_STEPS, False)]


def test_missing_memory_is_warned_of_once_per_attempt(staged: Guarded) -> None:
    """The first warning states the consequence; later snapshots fail for the same reason."""
    for slot in staged.snapshots.staging.slots:
        slot.buffer_path(0).symlink_to("nowhere")
    staged.step(5)
    staged.step(5 + saver.RETRY_STEPS)
    assert memory_warnings(staged) == [5]


def test_the_chosen_interval_is_printed_and_journaled(
    tmp_path: Path, session: Any, call: TrainCall, events: Events
) -> None:
    """By rank 0, once two snapshots have shown what they cost."""
    snapshots = Snapshots(session, StagingArea(tmp_path / "memory"))
    made = Saver(
        Trainer(tmp_path / "out"), session, call, snapshots=snapshots, collect_vote=lambda: None,
        exact=SimpleNamespace(),  # type: ignore[arg-type]
    )  # fmt: skip
    made.cadence.begin(0)
    made.cadence.taken(1, 0.5)
    made.cadence.taken(2, 0.5)
    (record,) = named(events, "snapshot_interval")
    assert (record["rank"], record["cost_seconds"], record["steps"] >= 1) == (0, 0.5, True)
    assert len(session.notified) == 1
    session.is_main = False
    made.cadence.taken(3, 5000.0)
    assert len(named(events, "snapshot_interval")) == 1


def test_a_snapshot_while_the_disk_is_behind_is_done_without(staged: Guarded) -> None:
    """All slots hold what the script asked for: that is no lack of memory."""
    for step in (1, 2, 3):
        staged.save(step)
    staged.step(5)
    assert staged.staged == [(3, True), (2, True), (1, True)]
    assert memory_warnings(staged) == []


def test_a_snapshot_of_weights_that_are_no_numbers_is_not_taken(staged: Guarded, events: Events) -> None:
    """It would replace the last good one; refused with the script's save of the same step, it is said once."""
    staged.step(4)
    staged.spoil()
    staged.step(5, scheduled=True)
    assert staged.staged == [(4, False)]
    assert len(named(events, "checkpoint_rejected")) == 1


def test_nobody_notices_a_snapshot(staged: Guarded) -> None:
    """No model card, no upload, no best checkpoint in a directory that will not be there."""
    staged.trainer.args.push_to_hub = True
    seen: list[tuple[bool, str]] = []
    staged.trainer.during = lambda path: seen.append(
        (staged.trainer.args.push_to_hub, str(staged.trainer.args.save_strategy.value))
    )
    staged.step(5)
    assert seen == [(False, "no")]
    assert staged.trainer.args.push_to_hub is True
    assert staged.trainer.args.save_strategy == "steps"
    assert staged.trainer.cards == 0
    staged.trainer.args.push_to_hub = False
    staged.trainer.during = lambda path: None
    staged.save(6)
    assert staged.trainer.cards == 1


def test_a_model_card_method_of_the_scripts_own_is_its_own_again(staged: Guarded) -> None:
    """Set on the trainer itself."""
    calls: list[int] = []

    def own() -> None:
        calls.append(staged.trainer.state.global_step)

    staged.trainer.create_model_card = own  # type: ignore[method-assign]
    staged.step(5)
    staged.save(6)
    assert calls == [6]


# ---- the end of a call ----


def test_the_end_is_saved_when_the_schedule_did_not(direct: Guarded) -> None:
    """Once; a checkpoint that is there already is left as it is."""
    direct.trainer.state.global_step = 7
    path = direct.saver.finish()
    assert path is not None
    assert read_manifest(path).step == 7
    assert direct.trainer.seen == [(direct.trainer.model_wrapped, None, None)]
    assert direct.saver.finish() == path
    assert len(direct.trainer.seen) == 1


def test_an_end_in_memory_is_waited_for(staged: Guarded, polls: list[Callable[[], Any]]) -> None:
    """It is marked as finished only when it is on disk."""
    staged.save(5)
    polls += [lambda: None, staged.drain, lambda: None]
    path = staged.saver.finish()
    assert path is not None
    assert read_manifest(path).step == 5
    assert len(staged.trainer.seen) == 1
    assert staged.session.notified == []


def test_an_end_that_nothing_holds_is_saved_and_waited_for(
    staged: Guarded, polls: list[Callable[[], Any]]
) -> None:
    """As the script's own."""
    staged.save(5)
    staged.trainer.state.global_step = 7
    polls += [staged.drain, lambda: None]
    path = staged.saver.finish()
    assert path is not None
    assert path.name == "checkpoint-7"
    assert read_manifest(path).scheduled


def test_an_end_that_only_a_snapshot_holds_is_saved(staged: Guarded, polls: list[Callable[[], Any]]) -> None:
    """Nobody makes a snapshot durable for half an hour, and the script would wait for it."""
    staged.step(5)
    assert staged.staged == [(5, False)]
    polls += [staged.drain, lambda: None]
    path = staged.saver.finish()
    assert path is not None
    assert read_manifest(path).scheduled


def test_an_end_that_the_disk_does_not_take_is_left_to_the_supervisor(
    staged: Guarded, polls: list[Callable[[], Any]], events: Events
) -> None:
    """The script goes on; a person is told."""
    staged.save(5)
    polls += [lambda: staged.snapshots.staging.set_trouble("the disk is full")]
    assert staged.saver.finish() is None
    assert "is not on disk yet" in staged.session.notified[0]
    assert len(named(events, "warning")) == 1


def test_an_end_that_is_durable_is_not_saved_again(staged: Guarded, polls: list[Callable[[], Any]]) -> None:
    """The supervisor had been quick, or it was saved directly."""
    staged.trainer.args.metric_for_best_model = "reward"
    path = staged.save(5)
    assert staged.saver.finish() == path
    assert len(staged.trainer.seen) == 1


@pytest.mark.parametrize("other", [{"run_id": "run-0"}, {"ordinal": 2}])
def test_another_ones_checkpoint_is_not_taken_for_the_end(
    direct: Guarded, call: TrainCall, other: dict[str, Any]
) -> None:
    """An earlier run's or call's of the same number, in the same directory."""
    path = Path(call.output_dir) / "checkpoint-7"
    path.mkdir(parents=True)
    (path / "old.bin").write_bytes(b"old")
    write_manifest(path, identity(call.output_dir, 7, **other))
    direct.trainer.state.global_step = 7
    assert direct.saver.finish() == path
    manifest = read_manifest(path)
    assert (manifest.run_id, manifest.train_call.ordinal) == ("run-1", 1)


def test_an_end_that_is_no_number_has_no_checkpoint(either: Guarded, events: Events) -> None:
    """And is not marked as finished."""
    either.spoil()
    either.trainer.state.global_step = 7
    assert either.saver.finish() is None
    assert either.trainer.seen == []
    assert len(named(events, "checkpoint_rejected")) == 1


def test_finishing_is_shown(direct: Guarded, reading: Callable[[], Slot]) -> None:
    """As a checkpoint, for as long as it takes."""
    during: list[Phase | None] = []
    direct.trainer.during = lambda path: during.append(reading().phase)
    direct.saver.finish()
    assert during == [Phase.checkpoint]
    assert reading().phases == ()


def test_nothing_is_left_in_the_output_directory_but_checkpoints(staged: Guarded, tmp_path: Path) -> None:
    """Whichever way they went."""
    staged.save(5)
    staged.drain()
    staged.step(6)
    staged.drain()
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-5", "checkpoint-6"]
