"""Every private name of transformers, TRL and torch that the guard leans on, and the versions it was tested with.

One place, so that a contract test (`tests/unit/trainers/test_upstream.py`) says at once what a new release moved.
Read by `attach.py`, `saving.py`, `recorder.py` and `cli.launch`. Importing it imports none of those libraries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

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

COLLECTIVE_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of torch's ProcessGroup that issue one collective of the group's sequence; what a release lacks is not wrapped."""
OUTPUT_FIRST = frozenset(COLLECTIVE_METHODS) - {
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
}
"""Of these, the ones called as (outputs, inputs)."""
GROUP_SEQUENCE = "_get_sequence_number_for_group"
"""ProcessGroup and backend method: how many collectives the group has been given."""
WORKER_SERVER = "_WorkerServer"
"""Torch's HTTP server on a unix socket, answering from C++ threads."""


def sequence_number(group: Any) -> int:
    """How many collectives a process group (or backend) has been given by this rank."""
    return int(getattr(group, GROUP_SEQUENCE)())


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
