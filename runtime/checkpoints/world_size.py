"""Whether a checkpoint of one number of ranks may be gone on from by another, and what would fit if not.

Replicated state (DDP) does not care who loads it, and the order of the data is kept when an optimizer step takes as
many samples as before. State cut over ranks (ZeRO, FSDP) is gone on from by as many ranks as wrote it. Called by the
guard when it resumes. Pure; does not know of a rollout under way, which its owner judges.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLICATED = (None, "ddp")
"""Layouts in which every rank holds everything; None is a manifest older than the field."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How an optimizer step's samples are spread."""

    ranks: int
    per_device: int
    accumulation: int

    @property
    def samples(self) -> int:
        """An optimizer step, over all ranks."""
        return self.ranks * self.per_device * self.accumulation

    def __str__(self) -> str:
        return (
            f"{_ranks(self.ranks)} x {self.per_device} samples x {self.accumulation} accumulation"
            f" = {self.samples} a step"
        )


def refusal(
    name: str, *, written_by: int, layout: str | None, written: Batch | None, now: Batch | None, ranks: int
) -> str | None:
    """Why `ranks` ranks may not go on from a checkpoint, with what would fit; None when they may.

    Args:
        name: of the checkpoint, for the sentence.
        written_by: ranks that wrote it.
        layout: how its state is cut over ranks; None when not known.
        written: the batch it was written with, None when not known.
        now: the script's batch, None when not known.
    """
    if written_by == ranks:
        return None
    if layout not in REPLICATED:
        return (
            f"{name} holds state that {layout} has cut over {_ranks(written_by)}, this run has {ranks}:"
            f" start {_ranks(written_by)}"
        )
    if written is None or now is None:
        return (
            f"{name} was written by {_ranks(written_by)}, this run has {ranks}, and it does not say with what"
            f" batch: start {_ranks(written_by)}"
        )
    if written.samples == now.samples:
        return None
    return f"{name} was written by {written}; {now}: {_what_fits(written.samples, now, written_by)}"


def _what_fits(samples: int, now: Batch, written_by: int) -> str:
    ways = []
    if samples % (now.ranks * now.accumulation) == 0:
        ways.append(f"per_device_train_batch_size={samples // (now.ranks * now.accumulation)}")
    if samples % (now.ranks * now.per_device) == 0:
        ways.append(f"gradient_accumulation_steps={samples // (now.ranks * now.per_device)}")
    fitting, rest = divmod(samples, now.per_device * now.accumulation)
    start = f"start {_ranks(written_by if rest else fitting)}"
    if rest:
        start += " with the batch it was written with"
    return f"set {' or '.join(ways)}, or {start}" if ways else start


def notice(name: str, *, written_by: int, ranks: int, samples: int) -> str:
    """What a person should know when a checkpoint is gone on from by another number of ranks."""
    return (
        f"{name} was written by {_ranks(written_by)}, this run has {ranks}: every step takes the same {samples}"
        " samples in the same order; random numbers (generation, dropout) differ"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
