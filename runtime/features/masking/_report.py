"""Tells the user and the journal which samples were excluded.

Called by `_masking.py` once for each rollout with masking. A rank writes the events of its own samples,
rank 0 those of groups and rollouts. The first sample of an attempt is a line on the terminal; then the counts
tell the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from grpo_run.runtime.features.masking._repeated import SampleFault
from grpo_run.runtime.features.masking._selection import Excluded, Selection
from grpo_run.runtime.features.masking.events import GroupMasked, MaskingReason, SampleMasked
from grpo_run.runtime.rank.session import Session

MOST_NUMBERS = 2048
"""Numbers of samples or groups in one event, which may have 64 KiB."""
EMPTY_ROLLOUTS = 8
"""So many rollouts in a row without any sample are a warning: the run computes and learns nothing."""
SENTENCES: dict[str, str] = {
    MaskingReason.nan: "returned NaN for it",
    MaskingReason.infinite: "returned a reward that is not finite in 32 bits",
    MaskingReason.output: "returned something other than one number or None for each completion",
    MaskingReason.failed: "failed on it",
}
"""What a reward function did, after its name. Other failures are those of the reward service, which says more
of them.
"""
SAID_HERE = {*SENTENCES, MaskingReason.length, MaskingReason.repetition, MaskingReason.deadline}
"""What nobody else says."""


class MaskingReporter:
    """Reports the masking of one call.

    Args:
        functions: names of the reward functions, as TRL logs them.
        train_call: the number of the call in the run.
    """

    def __init__(self, session: Session, functions: Sequence[str], train_call: int) -> None:
        self._session = session
        self._functions = functions
        self._train_call = train_call
        self._said = False
        self._said_not_applicable = False
        self._empty_rollouts = 0

    def excluded(
        self,
        selection: Selection,
        own: Mapping[int, SampleFault],
        *,
        step: int,
        rollout: int,
        evaluating: bool,
        steps_without_samples: int,
    ) -> None:
        """Report the masking of a rollout.

        Args:
            own: the masked samples of this rank, by their numbers in the rollout of all ranks.
            step: the optimizer step that is being computed.
            rollout: its number: the micro-step for which it was generated.
            steps_without_samples: optimizer steps to which the rollout gives no sample.
        """
        by_cause: dict[tuple[str | None, str], list[int]] = {}
        for number, sample in sorted(own.items()):
            by_cause.setdefault((self._function(selection.samples[number]), sample.reason), []).append(number)
        for (function, reason), numbers in by_cause.items():
            self._session.journal.write(
                SampleMasked(
                    rank=self._session.rank,
                    step=step,
                    train_call=self._train_call,
                    rollout=rollout,
                    function=function,
                    reason=str(reason),
                    samples=numbers[:MOST_NUMBERS],
                    digests=_digests([own[number] for number in numbers[:MOST_NUMBERS]]),
                    count=len(numbers),
                    evaluating=evaluating,
                )
            )
        if selection.groups and self._session.is_main:
            self._session.journal.write(
                GroupMasked(
                    rank=self._session.rank,
                    step=step,
                    groups=list(selection.groups[:MOST_NUMBERS]),
                    count=len(selection.groups),
                    of=selection.group_count,
                    steps_without_samples=steps_without_samples,
                    evaluating=evaluating,
                )
            )
        self._say_first(selection, own, step)

    def rollout(self, *, is_empty: bool, step: int) -> None:
        """Warn if no sample is left of many training rollouts in a row; once until a sample is left again.

        Args:
            is_empty: no sample of this rollout is left.
            step: the optimizer step that is being computed.
        """
        self._empty_rollouts = self._empty_rollouts + 1 if is_empty else 0
        if self._empty_rollouts == EMPTY_ROLLOUTS:
            self._session.warn(
                f"all samples of the last {EMPTY_ROLLOUTS} rollouts, up to step {step}, were excluded:"
                " nothing is learned, but the optimizer's momentum still changes the weights"
            )

    def not_applicable(self, columns: Collection[int]) -> None:
        """Say once that NaN was read as None.

        Args:
            columns: of the functions.
        """
        if not self._said_not_applicable:
            self._said_not_applicable = True
            names = ", ".join(self._functions[column] for column in sorted(columns))
            self._session.warn(
                f"reward function {names} returned NaN for every completion of a prompt:"
                " treated as not applicable, as in TRL. None has the same effect; NaN for a single"
                " completion excludes it"
            )

    def _say_first(self, selection: Selection, own: Mapping[int, SampleFault], step: int) -> None:
        """Say the first masking once, on the rank that has the sample, because only this one knows the
        reason.
        """
        first = min(
            number for number, why in selection.samples.items() if why.reason != MaskingReason.small_group
        )
        if self._said:
            return
        if first not in own:
            # of a failure, other ranks do not know whether the reward service has said it
            self._said = selection.samples[first].reason != MaskingReason.failed
        elif (reason := own[first].reason) in SAID_HERE:
            self._said = True
            function = self._function(selection.samples[first])
            cause = (
                f"reward function {function} {SENTENCES[reason]}"
                if function
                else f"its completion was cut ({reason})"
            )
            text = (
                f"step {step}: sample {first} of the rollout is excluded from baseline and loss: {cause}."
                " Further ones are counted in grpo_samples_masked_total and by `grpo-run status`"
            )
            if self._session.is_rank:  # this rank may be another than rank 0
                print(f"grpo-run: {text}", file=sys.stderr, flush=True)
                self._session.warn_in_journal(text)

    def _function(self, excluded: Excluded) -> str | None:
        return None if excluded.column is None else self._functions[excluded.column]


def _digests(samples: Sequence[SampleFault]) -> list[int] | None:
    """The digests of the samples of one event; None if they have none."""
    digests = [sample.digest for sample in samples if sample.digest is not None]
    return digests if len(digests) == len(samples) else None
