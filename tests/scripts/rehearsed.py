"""A job with one weakness that a rehearsal has to find; see `WEAKNESSES`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import tiny
from transformers import TrainerCallback

WEAKNESSES = ("none", "fails-again", "forgets", "shuffles", "judges", "writes")


class Forget(TrainerCallback):
    """Puts the first weights back whenever training begins."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._first = {name: value.clone() for name, value in model.state_dict().items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what a checkpoint has brought."""
        self._model.load_state_dict(self._first)


def judge(completions: list[str], **columns: Any) -> list[float]:
    """Return other rewards in every process."""
    return [random.SystemRandom().random() for _ in completions]


def main() -> None:
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--weakness", choices=WEAKNESSES, default="none")
    arguments = parser.parse_args()
    changes: dict[str, Any] = {}
    if arguments.weakness == "fails-again":
        marker = Path(os.environ["GRPO_RUN_TEST_MARKERS"]) / f"started-{os.getppid()}"
        if marker.exists():
            raise RuntimeError("this script cannot be started twice")
        marker.touch()
    elif arguments.weakness == "shuffles":
        rows = tiny.prompts(tiny.prompts_for_one_epoch(arguments))
        changes["train_dataset"] = rows.shuffle(seed=random.SystemRandom().randrange(2**31))
    elif arguments.weakness == "judges":
        changes["reward_funcs"] = [judge]
    elif arguments.weakness == "writes":
        arguments.output_dir.mkdir(exist_ok=True)
        (arguments.output_dir / "notes.txt").write_text(str(os.getpid()))
    trainer = tiny.rollout_trainer(arguments, **changes)
    if arguments.weakness == "forgets":
        trainer.add_callback(Forget(trainer.model))
    trainer.train()


if __name__ == "__main__":
    main()
