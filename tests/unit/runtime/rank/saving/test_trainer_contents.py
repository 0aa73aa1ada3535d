"""A trainer writes its checkpoint where it is told to, and is left as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Trainer

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents
from grpo_run.runtime.rank.trainer_facts import TrainerFacts


def test_the_output_directory_of_the_trainer_is_restored(
    tmp_path: Path, session: Any, call: TrainCall
) -> None:
    """Holds if the script has replaced the method on the trainer itself, and after an error."""
    trainer, folder = Trainer(tmp_path / "out"), tmp_path / "memory" / "checkpoint-5"
    exact: Any = SimpleNamespace(save=lambda folder: None, epoch_ended=False)
    contents = TrainerContents(trainer, TrainerFacts.of(trainer, 1), session, call, exact)
    before = vars(trainer).keys()
    assert contents.write(folder) == "what the method returns"
    assert (folder / "weights.pt").exists()
    assert vars(trainer).keys() == before
    own: Any = lambda trial=None: "mine"
    trainer._get_output_dir = own  # type: ignore[method-assign]
    contents.write(folder)
    assert trainer._get_output_dir is own

    def fail(path: Path) -> None:
        raise ValueError("a reward function's state")

    trainer.during = fail
    with pytest.raises(ValueError, match="reward"):
        contents.write(folder)
    assert trainer._get_output_dir is own
