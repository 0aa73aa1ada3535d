"""A plain TRL SFT script that keeps its best model: it evaluates at every step, and saves less often.

The score rises up to `--best-at` and falls after it. Writes `weights.sha256` and the trainer's final state,
without values that depend on the clock, to `state.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tiny
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

CLOCKED = ("runtime", "per_second")


class Score(TrainerCallback):
    """Adds the score to the metrics of every evaluation."""

    def __init__(self, best_at: int) -> None:
        self.best_at = best_at

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        metrics["eval_score"] = 100.0 - abs(state.global_step - self.best_at)


def without_clock(state: Any) -> dict[str, Any]:
    """Return the trainer's state with the best checkpoint's name, and without durations."""
    fields = asdict(state)
    best = fields["best_model_checkpoint"]
    fields["best_model_checkpoint"] = Path(best).name if best else None
    fields["log_history"] = [
        {name: value for name, value in entry.items() if not name.endswith(CLOCKED)}
        for entry in fields["log_history"]
    ]
    return fields


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--best-at", type=int, default=8)
    parser.add_argument("--patience", type=int, default=100)
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True, **tiny.settings(arguments),
    }  # fmt: skip
    trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        args=SFTConfig(**settings, max_length=32),
        train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
        eval_dataset=tiny.texts(4),
        processing_class=tokenizer,
        callbacks=[
            Score(arguments.best_at),
            EarlyStoppingCallback(early_stopping_patience=arguments.patience),
            *tiny.callbacks(arguments),
        ],
        **tiny.adapter(arguments),
    )
    tiny.train(trainer, arguments)
    if trainer.is_world_process_zero():
        Path("state.json").write_text(json.dumps(without_clock(trainer.state), indent=1, sort_keys=True))
    tiny.write_digest(trainer, arguments.output_dir)


if __name__ == "__main__":
    main()
