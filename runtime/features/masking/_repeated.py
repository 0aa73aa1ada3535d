"""Exclude the same samples again in a step that is repeated after a recovery.

A reward that did not come in time the first time may come the second time; the step would then not be the one
that the run had taken. A sample is known again by its place and its tokens: after a change of the seeds or
the script nothing is excluded that was not. Read from the journal when a call begins, used by `_masking.py`.
Rows that others have left out are not kept here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from grpo_run.runtime.features.masking.events import SampleMasked
from grpo_run.runtime.history.journal import read_newest
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.session import Session

MAX_JOURNAL_BYTES = 8 * 1024 * 1024
"""How much of the journal's end is read: thousands of steps, where a recovery repeats some."""


class SampleFault(NamedTuple):
    """Why a sample leaves, and the digest of its completion if a function's reward of it failed."""

    reason: str
    digest: int | None = None


Failures = Mapping[int, Mapping[str, Mapping[int, SampleFault]]]
"""By rollout, name of the function, and number of the sample in the rollout of all ranks."""


def completion_checksum(tokens: Sequence[int]) -> int:
    """Return a checksum of a completion."""
    return zlib.crc32(",".join(map(str, tokens)).encode())


def read_earlier(session: Session, train_call: int) -> EarlierMasking:
    """Read what earlier attempts have excluded in a call."""
    attempt = session.settings.attempt
    if attempt == 0:
        return EarlierMasking({})
    journal = RunDirectory(path=session.config.run_directory).journal
    events = read_newest(journal, SampleMasked, MAX_JOURNAL_BYTES)
    return EarlierMasking.of(events, train_call=train_call, attempt=attempt)


class EarlierMasking:
    """Failed rewards of earlier attempts."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    @classmethod
    def of(cls, events: Iterable[SampleMasked], *, train_call: int, attempt: int) -> EarlierMasking:
        """Take them from events of the journal.

        Args:
            train_call: the number of the call that is continued.
            attempt: the present one; only events of earlier attempts count, and of a rollout those of the
                last.
        """
        newest: dict[int, tuple[int, dict[str, dict[int, SampleFault]]]] = {}
        for event in events:
            if event.train_call != train_call or event.evaluating or not event.digests:
                continue
            if event.attempt is None or event.rollout is None:
                continue
            at, rollout, function = event.attempt, event.rollout, str(event.function)
            if len(event.samples) != len(event.digests):
                continue  # written by another version
            found = {
                number: SampleFault(event.reason, digest)
                for number, digest in zip(event.samples, event.digests, strict=True)
            }
            if at >= attempt or at < newest.get(rollout, (at,))[0]:
                continue
            if rollout not in newest or at > newest[rollout][0]:
                newest[rollout] = at, {}
            newest[rollout][1].setdefault(function, {}).update(found)
        return cls({rollout: failures for rollout, (_, failures) in newest.items()})

    def rows(
        self, rollout: int, function: str, first: int, completion_ids: Sequence[Sequence[int]]
    ) -> dict[int, str]:
        """Return why rewards of a function failed in one rank when the same completions were scored before,
        by row.

        Args:
            rollout: its number: the micro-step for which it is generated.
            first: number of the rank's first sample in the rollout of all ranks.
            completion_ids: tokens of the rank's completions.
        """
        return {
            number - first: failed.reason
            for number, failed in self._failures.get(rollout, {}).get(function, {}).items()
            if first <= number < first + len(completion_ids)
            and completion_checksum(completion_ids[number - first]) == failed.digest
        }
