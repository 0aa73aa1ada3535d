"""A checkpoint corrupted between a kill and the resume is set aside; the final weights are unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.search import find_checkpoints

VICTIM = "model.safetensors"
"""The safetensors format has no checksum, so only the manifest's digest detects a flipped bit in it."""


def flip_middle(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


@pytest.mark.full
def test_a_flipped_bit_in_the_newest_checkpoint_changes_no_weight(runs: Runs, tmp_path: Path) -> None:
    """After a kill of all processes and a flipped bit, the command resumes from the older checkpoint."""
    script, steps = str(SCRIPTS / "grpo.py"), ("--max-steps", "12", "--save-steps", "4")
    run = runs(
        "--nproc-per-node", "2", script, "--output-dir", "ours", *steps, "--step-seconds", "0.3"
    ).start()
    run.until_step(9)
    run.until_event("checkpoint_published", step=8)
    run.close()  # SIGKILL; the kernel then kills the ranks
    output = tmp_path / "ours"
    newest = next(found.path for found in find_checkpoints(output))
    assert newest.name == "checkpoint-8"
    flip_middle(newest / VICTIM)
    run.start()
    run.ended()
    assert digest(output) == undisturbed("grpo.py", 12)
    (rejected,) = run.events("checkpoint_rejected")
    assert (rejected["step"], rejected["cause"]) == (8, "checkpoint_corrupt")
    assert VICTIM in rejected["reason"]
    aside = output / "rejected-checkpoint-8"
    assert Path(rejected["moved_to"]).name == aside.name
    assert VICTIM in json.loads((aside / "REJECTED.json").read_text())["reason"]
    resumed = [e["step"] for e in run.events("train_started") if e["attempt"] == 1 and e["rank"] == 0]
    assert resumed == [4]
    rewritten = output / "checkpoint-8"
    verify_digests(rewritten, read_manifest(rewritten).files)
