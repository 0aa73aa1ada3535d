"""Every private name of transformers and TRL that the guard leans on, and the versions it was tested with.

One place, so that a contract test (`tests/unit/trainers/test_upstream.py`) says at once what a new release moved.
Read by `attach.py`, `saving.py` and `cli.launch`. Importing it imports none of those libraries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from grpo_run.runtime.errors import UntestedVersionError

TESTED = {
    "torch": SpecifierSet(">=2.13,<2.14"),
    "transformers": SpecifierSet(">=5.23,<5.24"),
    "trl": SpecifierSet(">=1.16,<1.17"),
    "accelerate": SpecifierSet(">=1.15,<1.16"),
}

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer method (model, trial): writes one checkpoint, a collective under DeepSpeed and FSDP."""
RUN_EPOCH = "_run_epoch"
"""Trainer method: one pass over the data; replaced to restore a finished call without training."""
GENERATE_AND_SCORE = "_generate_and_score_completions"
GENERATE = "_generate"
CALCULATE_REWARDS = "_calculate_rewards"
"""GRPO and RLOO methods, wrapped as they are and never unpacked."""
TRAINER_METHODS = (SAVE_CHECKPOINT, RUN_EPOCH)
ROLLOUT_METHODS = (GENERATE_AND_SCORE, GENERATE, CALCULATE_REWARDS)


def check_versions(*, allow_untested: bool, tested: dict[str, SpecifierSet] | None = None) -> list[str]:
    """Compare what is installed with what was tested.

    Returns:
        With `allow_untested`, a sentence for each library outside its range.

    Raises:
        UntestedVersionError: a library is missing, or outside its range and that was not allowed.
    """
    strange = []
    for name, range_ in (tested or TESTED).items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UntestedVersionError(f"{name} is not installed; install {name}{range_}") from None
        if not range_.contains(found.split("+")[0], prereleases=True):
            strange.append(f"{name} {found} is outside the tested range {range_}")
    if strange and not allow_untested:
        raise UntestedVersionError(
            "; ".join(strange) + "; install a tested version, or go on with --allow-untested"
        )
    return strange
