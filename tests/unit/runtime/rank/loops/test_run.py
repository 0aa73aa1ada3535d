"""One rank's loop: its steps, its saves, how it is resumed, and what is refused."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.journal import as_events

from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.search import snapshot_directories
from grpo_run.runtime.errors import ConfigError, Stopped
from grpo_run.runtime.history.history import History
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step import guard as guard_module
from grpo_run.runtime.rank.step.guard import guard_of
from grpo_run.trainers import loop
from grpo_run.watchdog.observation import Phase, RankState, Slot

Events = Callable[[], list[dict[str, Any]]]


class Hashable:
    """The session of the fixture, usable as a key."""

    def __init__(self, session: Any) -> None:
        vars(self).update(vars(session))


@pytest.fixture
def rank(session: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a rank."""
    made = Hashable(session)
    for method in (Session.record_left_loop, Session.script_raised, Session.script_returned):
        setattr(made, method.__name__, functools.partial(method, made))
    monkeypatch.setattr(loop, "current", lambda: made)
    return made


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forget what the calls of this attempt have in common, as a new process does."""
    yield guard_module._guards.clear
    guard_module._guards.clear()


class Script:
    """A script with a model and an optimizer."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.folder = folder / "out"
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "total": 0.0}
        self.lines: list[tuple[int, float, float]] = []

    def steps(self, n: int, **settings: Any) -> Any:
        """Begin a loop."""
        return loop.steps(n, state=self.state, output_dir=self.folder, **settings)

    def begin(self, **settings: Any) -> Any:
        """Begin a loop over `while`."""
        return loop.begin(state=self.state, output_dir=self.folder, **settings)

    def step(self, step: int) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 3)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.state["total"] += loss.item()
        self.lines.append((step, self.state["total"], float(torch.rand(()))))

    def train(self, n: int, **settings: Any) -> list[tuple[int, float, float]]:
        """Run a loop and return what it logged."""
        for step in self.steps(n, **settings):
            self.step(step)
        return self.lines


def test_outside_the_launcher_a_loop_counts(tmp_path: Path) -> None:
    """Nothing is written."""
    script = Script(tmp_path)
    assert [line[0] for line in script.train(3, save_every=1)] == [0, 1, 2]
    assert not script.folder.exists()
    data = loop.steps(5, state=script.state, output_dir=script.folder, data=[7, 8])
    assert len(data) == 5
    assert list(data) == [(0, 7), (1, 8), (2, 7), (3, 8), (4, 7)]
    with loop.begin(state=script.state, output_dir=script.folder) as run:
        while run.step < 3:
            run.commit(run.step)
    assert run.ended


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_resumed_loop_goes_on(
    at: int, rank: Any, again: Callable[[], None], tmp_path: Path, reading: Callable[[], Slot]
) -> None:
    """With the numbers of the loop that was not interrupted."""
    expected = Script(tmp_path / "plain").train(5)
    first = Script(tmp_path)
    for step in first.steps(5, save_every=1):
        if step == at:
            break  # a kill, for what is on disk
        first.step(step)
    again()
    rank.settings = replace_settings(rank.settings)
    second = Script(tmp_path)
    steps = second.steps(5, save_every=1)
    assert len(steps) == 5 - at
    assert reading().resumed_step == at
    torch.rand(3)  # the script may draw numbers before its first step
    for step in steps:
        second.step(step)
    assert first.lines == expected[:at]
    assert second.lines == expected[at:]


def replace_settings(settings: Any) -> Any:
    """Return the settings of a later attempt."""
    return settings.model_copy(update={"attempt": 1})


@pytest.mark.parametrize("early", [False, True])
def test_a_finished_loop_is_restored(
    early: bool, rank: Any, again: Callable[[], None], tmp_path: Path
) -> None:
    """It yields nothing; its objects and generators are as at its end. `end` counts the step in progress."""
    first = Script(tmp_path)
    steps = first.steps(9 if early else 4)
    for step in steps:
        first.step(step)
        if early and step == 3:
            steps.end()
    assert [line[0] for line in first.lines] == [0, 1, 2, 3]
    number = float(torch.rand(()))
    again()
    second = Script(tmp_path)
    assert second.train(9 if early else 4) == []
    assert float(torch.rand(())) == number
    assert torch.equal(second.model.weight, first.model.weight)
    assert second.state["total"] == first.state["total"]


def marks(events: Events) -> list[int]:
    """After how many steps the loop was left, in the order of the journal."""
    return [record["ends_after"] for record in events() if record["event"] == "loop_left"]


@pytest.mark.parametrize(("before_training", "last"), [(False, 3), (True, 2)])
def test_a_loop_that_was_left_by_break_ends_there_after_a_restart(
    before_training: bool,
    last: int,
    rank: Any,
    again: Callable[[], None],
    tmp_path: Path,
    events: Events,
    reading: Callable[[], Slot],
) -> None:
    """Although the script would go on then. A step that has trained belongs to the loop, another one does
    not.
    """
    expected = Script(tmp_path / "plain").train(last + 1)
    number = float(torch.rand(()))
    first = Script(tmp_path)
    for step in first.steps(9, save_every=2):
        if before_training and step == 3:
            break
        first.step(step)
        if step == 3:
            break
    assert (reading().state, reading().phase) == (RankState.between, Phase.idle)
    assert first.lines == expected
    assert float(torch.rand(())) == number
    assert marks(events) == []
    rank.record_left_loop()  # another call begins, or the script ends
    assert marks(events) == [last + 1]
    again()
    known = History.of(as_events(events())).calls.to_pass()
    rank.settings = rank.settings.model_copy(update={"attempt": 1, "known_calls": known})
    second = Script(tmp_path)
    assert second.train(9, save_every=2) == expected[2:]
    assert float(torch.rand(())) == number
    assert f"loop 2 ends after step {last + 1}: the script left it there before the restart" in rank.notified


def test_a_loop_that_is_left_by_an_exception_is_in_progress_when_the_script_ends(
    rank: Any, tmp_path: Path, events: Events, reading: Callable[[], Slot]
) -> None:
    """Nothing says that it ends there after a restart."""
    script = Script(tmp_path)

    def train() -> None:
        for step in script.steps(9):
            script.step(step)
            if step == 3:
                raise ValueError("no break")

    with pytest.raises(ValueError, match="no break"):
        train()
    assert reading().state is RankState.between
    rank.script_raised()
    assert reading().state is RankState.training
    assert marks(events) == []


def test_a_loop_with_a_name_may_go_on_after_a_break(
    rank: Any, tmp_path: Path, events: Events, reading: Callable[[], Slot]
) -> None:
    """The step in progress counts when the next one is asked for."""
    expected = Script(tmp_path / "plain").train(5)
    script = Script(tmp_path)
    steps = script.steps(5)
    for step in steps:
        script.step(step)
        if step == 1:
            break
    assert reading().state is RankState.between
    for step in steps:
        assert (reading().state, reading().step) == (RankState.training, step)
        script.step(step)
    assert script.lines == expected
    rank.script_returned()
    assert marks(events) == []
    assert reading().committed_step == 5


def test_another_loop_may_begin_after_a_break(rank: Any, tmp_path: Path, events: Events) -> None:
    """Also while the script has a name for the first, which cannot go on then."""
    script, other = Script(tmp_path), Script(tmp_path / "second")
    steps = script.steps(5)
    for step in steps:
        script.step(step)
        break
    inside = other.steps(3)
    for step in inside:
        other.step(step)
        if step == 0:
            with pytest.raises(ConfigError, match="after another call has started"):
                next(steps)
            del steps
            assert guard_of(rank).running == "loop"
    assert [line[0] for line in other.lines] == [0, 1, 2]
    assert marks(events) == [1]
    assert [record["event"] for record in events()].count("train_ended") == 1


def test_the_scripts_own_checkpoints_are_kept_to_their_limit(rank: Any, tmp_path: Path) -> None:
    """Every `save_every` steps."""
    script = Script(tmp_path)
    script.train(7, save_every=2, save_total_limit=2)
    names = sorted(path.name for path in script.folder.glob("checkpoint-*"))
    assert names == ["checkpoint-4", "checkpoint-6"]
    manifest = read_manifest(script.folder / "checkpoint-6")
    assert (manifest.layout, manifest.train_call.trainer_class) == ("ddp", "loop")
    assert {"model.pt", "optimizer.pt", "grpo_run/rank0.json"} <= set(manifest.files)
    ((last,),) = (list(place.iterdir()) for place in snapshot_directories(script.folder))
    assert last.name == "snapshot-7"
    assert read_manifest(last).finished


def test_a_loop_is_published_and_journaled(
    rank: Any, tmp_path: Path, reading: Callable[[], Slot], events: Events
) -> None:
    """As a call of the run."""
    script = Script(tmp_path)
    seen = []
    for step in script.steps(3):
        seen.append((reading().state, reading().phase, reading().step, reading().target_steps))
        script.step(step)
    assert seen == [(RankState.training, Phase.forward_backward, step, 3) for step in range(3)]
    assert (reading().state, reading().phase, reading().committed_step) == (RankState.between, Phase.idle, 3)
    named = [record["event"] for record in events()]
    assert [name for name in named if name.startswith(("train", "resume"))] == [
        "resume_chosen", "train_started", "train_ended",
    ]  # fmt: skip


def test_a_stop_takes_effect_with_a_snapshot(rank: Any, again: Callable[[], None], tmp_path: Path) -> None:
    """After at most two steps; the loop goes on from there."""
    script = Script(tmp_path)

    def train() -> None:
        for step in script.steps(9):
            if step == 2:
                rank.board.request_stop()
            script.step(step)

    with pytest.raises(Stopped) as raised:
        train()
    assert 3 <= raised.value.step <= 5
    (place,) = snapshot_directories(script.folder)
    assert os.listdir(place) == [f"snapshot-{raised.value.step}"]


def test_pending_gradients_are_refused(rank: Any, tmp_path: Path) -> None:
    """The message names the step."""
    script = Script(tmp_path)

    def train() -> None:
        for _ in script.steps(3):
            script.model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(ConfigError, match="step 0 of a loop ends with gradients"):
        train()


def test_nested_loops_are_refused(rank: Any, tmp_path: Path) -> None:
    """Also inside a Trainer's call; one after another is not nested."""
    script = Script(tmp_path)

    def nest() -> None:
        for _ in script.steps(3):
            loop.begin(state={}, output_dir=tmp_path / "inner")

    with pytest.raises(ConfigError, match="cannot be nested"):
        nest()
    for _ in script.steps(3):
        break
    Script(tmp_path / "second").train(2)
    guard_of(rank).running = "GRPOTrainer"
    with pytest.raises(ConfigError, match=r"inside GRPOTrainer.train\(\)"):
        script.steps(3)


@pytest.mark.parametrize("plain", [False, True])
def test_a_loop_over_while_that_ends_within_a_step_contains_what_it_has_trained(
    plain: bool, rank: Any, again: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the optimizer has done is in the saved model; a step that has not trained does not count, as in
    `while True: if done: break`. Without the launcher as many steps are counted.
    """
    if plain:
        monkeypatch.setattr(loop, "current", lambda: None)
    first = Script(tmp_path)
    with first.begin() as run:
        while True:
            first.step(run.step)
            if run.step == 3:
                break
            run.commit()
    assert run.step == 4
    run.end()
    assert run.step == 4
    other = Script(tmp_path / "other")
    with other.begin() as run:  # ends before it trains
        while run.step < 3:
            other.step(run.step)
            run.commit()
    assert run.step == 3
    if plain:
        return
    again()
    second = Script(tmp_path)
    with second.begin() as run:
        assert (run.step, run.ended) == (4, True)
    assert torch.equal(second.model.weight, first.model.weight)
    assert second.state["total"] == first.state["total"]


def test_a_loop_over_while_checks_its_count(rank: Any, tmp_path: Path) -> None:
    """A step that was left out would be lost in a recovery."""
    script = Script(tmp_path)
    run = loop.begin(3, state=script.state, output_dir=script.folder)
    run.commit(0)
    with pytest.raises(ConfigError, match=r"commit\(2\), but the step in progress is 1"):
        run.commit(2)
    run.commit()
    run.commit(2)
    assert run.ended
    with pytest.raises(ConfigError, match="after the end"):
        run.commit()


@pytest.mark.parametrize("wrong", [{"n": -1}, {"n": 3, "save_every": 0}])
def test_wrong_numbers_are_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    """In a line that names them."""
    with pytest.raises(ConfigError, match="loop"):
        loop.steps(**wrong, state={}, output_dir=tmp_path)  # type: ignore[call-overload]
