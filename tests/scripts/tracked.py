"""A plain TRL SFT script that reports to trackers; with `--calls 2`, two trainings in a row.

`--own-runs` opens runs of wandb and MLflow in the script, as many users do.
"""

from __future__ import annotations

import os

import tiny
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--own-runs", action="store_true", help="the script opens and ends the runs")
    arguments = parser.parse_args()
    tokenizer = tiny.tokenizer()
    own_runs = arguments.own_runs and os.environ["RANK"] == "0"
    for call in range(1, arguments.calls + 1):
        if own_runs:
            import mlflow
            import wandb

            wandb.init(project="sums", job_type="data").finish()
            wandb.init(project="sums", job_type="train")
            mlflow.start_run()
        folder = arguments.output_dir / str(call)
        trainer = SFTTrainer(
            model=tiny.model(len(tokenizer), arguments.seed),
            args=SFTConfig(**{**tiny.settings(arguments), "output_dir": str(folder)}, max_length=32),
            train_dataset=tiny.texts(tiny.texts_for_one_epoch(arguments)),
            processing_class=tokenizer,
            callbacks=[*tiny.callbacks(arguments), tiny.SleepAtStep(arguments.step_seconds)],
        )
        tiny.train(trainer, arguments)
        if own_runs:
            wandb.run.finish()
            mlflow.end_run()
        tiny.write_digest(trainer, folder)


if __name__ == "__main__":
    main()
