"""A trainer whose saves go through a real `Saver`, and a record of what happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.saving._cadence import Cadence
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents, save_through
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.snapshots._drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request

Events = Callable[[], list[dict[str, Any]]]


class Trainer:
    """A trainer that writes checkpoints, and calls the method after each step, like transformers."""

    def __init__(self, output: Path) -> None:
        self.args = SimpleNamespace(
            output_dir=str(output), save_total_limit=None, save_only_model=False, should_save=True,
            push_to_hub=False, metric_for_best_model=None, save_strategy="steps",
            per_device_train_batch_size=4, gradient_accumulation_steps=2,
        )  # fmt: skip
        self.control = SimpleNamespace(should_training_stop=False, should_epoch_stop=False)
        self.state = SimpleNamespace(
            global_step=5, max_steps=1000, epoch=0.5, best_model_checkpoint=None, stateful_callbacks={}
        )
        self.model = torch.nn.Linear(4, 2)
        self.model_wrapped = object()
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.should_save = False
        self.seen: list[Any] = []
        self.cards = 0
        self.during: Callable[[Path], None] = lambda path: None

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the script's output directory."""
        return str(self.args.output_dir)

    def create_model_card(self) -> None:
        """Count the call, which TRL makes in its checkpoint method."""
        self.cards += 1

    def _save_checkpoint(self, model: Any, trial: Any) -> str:
        """Write a checkpoint."""
        path = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        self.create_model_card()
        torch.save({"weight": self.model.weight.detach()}, path / "weights.pt")
        (path / "trainer_state.json").write_text(f'{{"global_step": {self.state.global_step}}}')
        self.seen.append((model, trial, self.args.save_total_limit))
        self.during(path)
        return "what the method returns"

    def _maybe_log_save_evaluate(self, *args: Any) -> str:
        """Save if the schedule says so."""
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
    """A trainer with an installed `Saver`, and a record of what happened."""

    def __init__(
        self, trainer: Trainer, session: Any, call: TrainCall, snapshots: Snapshots | None = None
    ) -> None:
        self.trainer = trainer
        self.session = session
        self.given_snapshots = snapshots
        self.order: list[str] = []
        self.exact: list[Path] = []
        self.taken: list[tuple[int, float]] = []
        exact: Any = SimpleNamespace(save=self._save_exact, epoch_ended=False)
        self.exact_state = exact
        contents = TrainerContents(trainer, TrainerFacts.of(trainer, 1), session, call, exact)
        self.saver = Saver(
            contents, session, snapshots=snapshots, collect_vote=lambda: self.order.append("agree")
        )
        self.saver.cadence = RecordingCadence(self.taken)
        self.hooks = ExitStack()
        self.hooks.enter_context(save_through(self.saver, trainer, contents, self.saver.after_step))

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of the rank."""
        assert self.given_snapshots is not None
        return self.given_snapshots

    def _save_exact(self, folder: Path) -> None:
        self.exact.append(folder)
        self.order.append("exact")
        (folder / "exact.json").write_text("{}")

    def save(self, step: int) -> Path:
        """Save at a step, as the script's schedule does; return the checkpoint's path."""
        self.trainer.state.global_step = step
        self.trainer._save_checkpoint("model", None)
        return Path(self.trainer.args.output_dir) / f"checkpoint-{step}"

    def step(self, step: int, *, due: bool = True, scheduled: bool = False) -> None:
        """Finish a step; a snapshot may be due after it."""
        self.trainer.state.global_step = step
        self.saver.cadence.decide(step, agreed=due)
        self.trainer.should_save = scheduled
        assert self.trainer._maybe_log_save_evaluate(0.5) == "what that returns"

    @property
    def staged(self) -> list[tuple[int, bool]]:
        """Step of each snapshot in memory, newest first, and whether it is scheduled."""
        return [(staged.step, staged.scheduled) for staged, _ in self.snapshots.staging.snapshots()]

    def drain(self) -> Path:
        """Write the newest snapshot to disk, like the supervisor; return the checkpoint's path."""
        staging = self.snapshots.staging
        answered = handle_request(
            staging, DrainRequest(slot=staging.snapshots()[0][1].index), lambda written: None
        )
        assert isinstance(answered, DrainPublished), answered
        return Path(answered.path)

    def make_non_finite(self) -> None:
        """Set a weight to NaN."""
        with torch.no_grad():
            self.trainer.model.weight[0, 0] = float("nan")


def named(events: Events, name: str) -> list[dict[str, Any]]:
    """Return the journal records of an event."""
    return [record for record in events() if record["event"] == name]
