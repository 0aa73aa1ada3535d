"""User callbacks around a save behave as under torchrun, also when only one rank has them."""

from __future__ import annotations

from pathlib import Path

from support.runs import WITH_SCRIPTS, Runs, before_training

READER = """
    from pathlib import Path

    from transformers import TrainerCallback

    class Uploader(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            assert (saved / "model.safetensors").is_file() and (saved / "MANIFEST.json").is_file(), saved
            with open("uploaded.txt", "a") as file:
                file.write(f"{state.global_step}\\n")

    if trainer.is_world_process_zero():
        trainer.add_callback(Uploader())
"""


def test_on_save_callback_of_rank_zero_finds_a_complete_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """`on_save` finds each checkpoint complete on disk and is not called for snapshots."""
    before_training(tmp_path / "uploads.py", READER)
    run = runs(
        "--snapshot-every", "1", "--nproc-per-node", "2", "uploads.py", "--output-dir", "out",
        "--max-steps", "6", "--save-steps", "2", environment=WITH_SCRIPTS,
    ).start().ended()  # fmt: skip
    assert run.status()["recoveries"] == []
    assert (tmp_path / "uploaded.txt").read_text().split() == ["2", "4", "6"]
    assert [event["step"] for event in run.events("checkpoint_staged")] == [1, 2, 3, 4, 5, 6]
