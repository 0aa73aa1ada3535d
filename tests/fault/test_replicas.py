"""A rank whose device computes wrongly is found and named, and the run ends in the weights of one in which
none does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest
from support.trainer_and_loop import TRAINER

from grpo_run.runtime.features.learning_guards.settings import LearningGuard

STEPS = ("--max-steps", "12", "--save-steps", "4")
CHECKPOINTING = "gradient_checkpointing"
FLIPS = str(SCRIPTS / "flips.py")


@pytest.mark.parametrize(
    ("what", "at", "found"),
    [
        ("weight", 6, 8),
        ("reduced", 5, 6),
        pytest.param("weight", 8, 8, marks=pytest.mark.full),
        pytest.param("moment", 7, 8, marks=pytest.mark.full),
        pytest.param("gradient", 6, 8, marks=pytest.mark.full),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_is_named(
    what: str, at: int, found: int, runs: Runs, tmp_path: Path
) -> None:
    """With two ranks by an exact repetition, which changes nothing else; in the next step if it is in what
    ranks have reduced.
    """
    run = (
        runs("--nproc-per-node", "2", "--compare-every", "4", FLIPS, "--output-dir", "out", *STEPS,
             "--flip", what, "--flip-at", str(at))
        .start()
        .ended()
    )  # fmt: skip
    assert digest(tmp_path / "out") == undisturbed(TRAINER, 12)
    (recovery,) = run.status()["recoveries"]
    assert (recovery["cause"], recovery["step"]) == ("replicas_differ", found)
    (named,) = run.events("replica_named")
    assert (named["step"], named["ranks"]) == (found, [1])
    assert "shows rank 1 computed wrongly" in run.printed()


@pytest.mark.full
def test_of_four_ranks_the_majority_is_right(runs: Runs, tmp_path: Path) -> None:
    """The verdict names the rank before anything is repeated."""
    run = (
        runs("--nproc-per-node", "4", "--compare-every", "4", FLIPS, "--output-dir", "out", *STEPS,
             "--flip-at", "6", "--flip-rank", "2")
        .start()
        .ended()
    )  # fmt: skip
    (verdict,) = run.verdicts()
    assert verdict["sentence"].startswith("Rank 2 and the others hold different values of ")
    assert verdict["guard"]["ranks"] == [2]
    assert run.events("replica_named") == []


@pytest.mark.full
def test_ranks_that_differ_again_end_the_run(runs: Runs) -> None:
    """A device that stays wrong is not trained on."""
    run = (
        runs("--nproc-per-node", "2", "--compare-every", "4", FLIPS, "--output-dir", "out", *STEPS,
             "--flip-at", "6", "--times", "9", "--moves")
        .start()
        .ended(93)
    )  # fmt: skip
    assert [event["action"] for event in run.events("action")] == ["restart_from_earlier_checkpoint", "stop"]


@pytest.mark.full
def test_a_script_that_lets_ranks_differ_trains_on(runs: Runs) -> None:
    """It does so again in the exact repetition, in the same bits; said once, and the run ends well."""
    run = (
        runs("--nproc-per-node", "2", "--compare-every", "4", FLIPS, "--output-dir", "out", *STEPS,
             "--flip-at", "6", "--times", "9")
        .start()
        .ended()
    )  # fmt: skip
    assert [event["action"] for event in run.events("action")] == ["restart_from_earlier_checkpoint"]
    assert run.printed().count("gives the same difference between the ranks") == 1


HEALTHY_STEPS = 840
ALL_ROLL_BACK = [f"--guard={guard}=roll-back" for guard in LearningGuard]
GRPO = ("--max-completion-length", "3")
HEALTHY: dict[str, tuple[str, tuple[str, ...], str]] = {
    "grpo": ("grpo.py", GRPO, ""),
    "grpo-accumulated": ("grpo.py", (*GRPO, "--gradient-accumulation-steps", "2"), ""),
    "grpo-iterated": ("grpo.py", (*GRPO, "--num-iterations", "2", "--steps-per-generation", "2"), ""),
    "grpo-adapter": ("grpo.py", (*GRPO, "--lora"), ""),
    "grpo-reference": ("grpo.py", (*GRPO, "--settings", '{"beta": 0.04}'), ""),
    "rloo": ("rloo.py", GRPO, ""),
    "sft": ("sft.py", (), ""),
    "sft-checkpointed": ("sft.py", ("--settings", json.dumps({CHECKPOINTING: True})), ""),
    "sft-adafactor": ("sft.py", ("--settings", '{"optim": "adafactor", "bf16": true}'), ""),
    "sft-noise": ("sft.py", ("--settings", '{"neftune_noise_alpha": 5, "max_grad_norm": 0}'), ""),
    "experts": ("experts.py", GRPO, ""),
    "loop": ("grpo_loop.py", (), ""),
    "zero2": ("grpo.py", GRPO, "zero2"),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_ranks_never_differ(kind: str, runs: Runs, tmp_path: Path) -> None:
    """Over more than 10,000 steps of all kinds, compared after every third step, and no guard of learning
    trips.
    """
    script, arguments, mode = HEALTHY[kind]
    run = (
        runs("--nproc-per-node", "2", "--compare-every", "3", *ALL_ROLL_BACK, str(SCRIPTS / script),
             "--output-dir", str(tmp_path / "out"), "--max-steps", str(HEALTHY_STEPS), "--save-steps", "400",
             *arguments, mode=mode)
        .start()
        .ended(timeout_seconds=900)
    )  # fmt: skip
    status = run.status()
    assert status["step"] == HEALTHY_STEPS
    assert status["recoveries"] == []
    assert run.events("guard_tripped") == []
    compared = run.events("replicas_compared")
    assert compared[-1]["tensors"] > 0
    assert compared[-1]["excluded"] == 0
